"""``python -m openrlhf.cli.train_sft``: supervised fine-tuning. Also under torchrun and ``deepspeed --module``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import train


def main(argv: Sequence[str] | None = None) -> int:
    """See :func:`openrlhf.cli.common.train`."""
    return train("train_sft", "openrlhf.trainer.sft", argv)


if __name__ == "__main__":
    sys.exit(main())
