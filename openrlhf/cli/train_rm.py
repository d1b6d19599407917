"""``python -m openrlhf.cli.train_rm``: a reward model from pairs. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.common import train
from openrlhf.utils.process import leave

main = partial(train, "train_rm", "openrlhf.trainer.reward_model")

if __name__ == "__main__":
    leave(main())
