"""``python -m openrlhf.cli.train_sft``: supervised fine-tuning. Also under torchrun and ``deepspeed --module``."""

from __future__ import annotations

from functools import partial

from openrlhf.cli.common import train
from openrlhf.utils.process import leave

main = partial(train, "train_sft", "openrlhf.trainer.sft")

if __name__ == "__main__":
    leave(main())
