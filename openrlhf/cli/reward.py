"""``python -m openrlhf.cli.reward test``: try a reward before a run depends on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from openrlhf.cli.common import tool, with_task


def main(argv: Sequence[str] | None = None) -> int:
    """Score samples, as the flags say; the word ``test`` comes first."""
    return tool("reward", "openrlhf.tools.reward_test", with_task(argv))


if __name__ == "__main__":
    sys.exit(main())
