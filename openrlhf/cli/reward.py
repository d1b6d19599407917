"""``python -m openrlhf.cli.reward test``: try a reward before a run depends on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import with_task
from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then score samples.

    Returns:
        The exit status: 0, or 1 for a failure that was explained, a sample without a reward included.
    """
    cfg = parse_cli("reward", with_task(argv))
    from openrlhf.tools.report import print_report
    from openrlhf.tools.reward_test import reward_test

    return print_report(reward_test, cfg)


if __name__ == "__main__":
    sys.exit(main())
