"""``python -m openrlhf.cli.reward test``: try a reward before a run depends on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import run_tool, with_task
from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then score samples; the exit status is that of :func:`run_tool`."""
    cfg = parse_cli("reward", with_task(argv))
    from openrlhf.tools.reward_test import reward_test

    return run_tool(reward_test, cfg)


if __name__ == "__main__":
    sys.exit(main())
