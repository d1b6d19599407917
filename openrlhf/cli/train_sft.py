"""``python -m openrlhf.cli.train_sft``: supervised fine-tuning. Also under torchrun and ``deepspeed --module``."""

from __future__ import annotations

import sys
from functools import partial

from openrlhf.cli.common import train

main = partial(train, "train_sft", "openrlhf.trainer.sft")

if __name__ == "__main__":
    sys.exit(main())
