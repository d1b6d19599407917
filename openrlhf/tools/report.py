"""Commands that try something of a user's and tell how it went (``reward test``, ``hooks check``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from openrlhf.utils.errors import ExplainedError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Report:
    """A text for people, and the number of samples or hooks that failed."""

    text: str
    failures: int


def print_report(check: Callable[[Config], Report], cfg: Config) -> int:
    """Run a check and print what it says.

    Returns:
        The exit status: 0, or 1 for a failure, also for one that kept the check from being made.
    """
    try:
        report = check(cfg)
    except ExplainedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.text)
    return 1 if report.failures else 0
