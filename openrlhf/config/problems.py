"""What can be wrong with a configuration, and how it is told."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

LINE_WIDTH = 110


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a configuration.

    Attributes:
        flag: canonical name of the flag concerned (or the text that was written, if it is no flag).
        problem: what is wrong.
        fix: what to do about it.
    """

    flag: str
    problem: str
    fix: str


def not_there(flag: str, what: str) -> Violation:
    """For a path that does not exist.

    Args:
        what: the path, and before it, if known, what it should be.
    """
    return Violation(flag, f"there is no {what} here ({os.getcwd()})", "check the path")


class FlagValueError(ValueError):
    """A flag's value that can't be used: what is wrong, and what to write instead."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem, self.fix = problem, fix


def refused(flag: str, check: Callable[..., Any], *values: Any) -> Iterator[Violation]:
    """The FlagValueError that a check of a flag's value raises, if it does, as a violation."""
    try:
        check(*values)
    except FlagValueError as error:
        yield Violation(flag, error.problem, error.fix)


class ConfigError(Exception):
    """A configuration that can't be used; tells all that is wrong with it at once."""

    def __init__(self, command: str, violations: Sequence[Violation]) -> None:
        self.command = command
        self.violations = tuple(violations)
        super().__init__(format_violations(command, violations))


def format_violations(command: str, violations: Sequence[Violation]) -> str:
    """All violations as one message for people."""
    count = "1 problem" if len(violations) == 1 else f"{len(violations)} problems"
    lines = [f"{command}: {count} with the options"]
    for violation in violations:
        lines.append("")
        name = violation.flag
        lines.append(f"  --{name}" if name.isidentifier() else f"  {name}")
        for head, text in (("    ", violation.problem), ("    -> ", violation.fix)):
            if text:
                lines.extend(
                    textwrap.wrap(
                        text,
                        LINE_WIDTH,
                        initial_indent=head,
                        subsequent_indent=" " * len(head),
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
    return "\n".join(lines)
