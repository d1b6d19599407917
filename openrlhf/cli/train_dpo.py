"""``python -m openrlhf.cli.train_dpo``: direct preference optimization. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import train


def main(argv: Sequence[str] | None = None) -> int:
    """See :func:`openrlhf.cli.common.train`."""
    return train("train_dpo", "openrlhf.trainer.dpo", argv)


if __name__ == "__main__":
    sys.exit(main())
