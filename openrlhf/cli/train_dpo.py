"""``python -m openrlhf.cli.train_dpo``: direct preference optimization. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.common import train
from openrlhf.utils.process import leave

main = partial(train, "train_dpo", "openrlhf.trainer.dpo")

if __name__ == "__main__":
    leave(main())
