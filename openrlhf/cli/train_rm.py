"""``python -m openrlhf.cli.train_rm``: a reward model from pairs. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

import sys
from functools import partial

from openrlhf.cli.common import train

main = partial(train, "train_rm", "openrlhf.trainer.reward_model")

if __name__ == "__main__":
    sys.exit(main())
