"""``python -m openrlhf.cli.batch_inference``: responses to, or scores of, the rows of a data set."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import run_tool
from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then run; the exit status is that of :func:`run_tool`."""
    cfg = parse_cli("batch_inference", argv)
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.tools.batch_inference import run

    return run_tool(run, cfg)


if __name__ == "__main__":
    sys.exit(main())
