"""``python -m openrlhf.cli.train_rm``: a reward model from pairs. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import train


def main(argv: Sequence[str] | None = None) -> int:
    """See :func:`openrlhf.cli.common.train`."""
    return train("train_rm", "openrlhf.trainer.reward_model", argv)


if __name__ == "__main__":
    sys.exit(main())
