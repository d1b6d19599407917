"""``python -m openrlhf.cli.train_dpo``: direct preference optimization. Also under torchrun and ``deepspeed``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then train.

    Returns:
        The exit status: 0, or 1 for a failure that was explained.
    """
    cfg = parse_cli("train_dpo", list(sys.argv[1:] if argv is None else argv))
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.trainer.dpo import run

    return run(cfg)


if __name__ == "__main__":
    sys.exit(main())
