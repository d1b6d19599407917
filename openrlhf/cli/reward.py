"""``python -m openrlhf.cli.reward test``: try a reward before a run depends on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.config import parse_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then score samples. The first word is short for ``--task``.

    Returns:
        The exit status: 0, or 1 for a failure that was explained, a sample without a reward included.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and "=" not in words[0]:
        words.insert(0, "--task")
    cfg = parse_cli("reward", words)
    from openrlhf.tools.report import print_report
    from openrlhf.tools.reward_test import reward_test

    return print_report(reward_test, cfg)


if __name__ == "__main__":
    sys.exit(main())
