"""The metrics that docs/metrics.md and docs/rollouts.md name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIRST_CELL = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
KEYS = ("kind", "step", "time")


def documented() -> set[str]:
    """The names in the first columns, and all of evaluations; `<source>` and the like stand for any text."""
    metrics, rollouts = ((DOCS / page).read_text(encoding="utf-8") for page in ("metrics.md", "rollouts.md"))
    names = re.findall(r"`([^`]+)`", " ".join(FIRST_CELL.findall(metrics)))
    return {*names, *re.findall(r"`(eval_[\w<>]+)`", rollouts)}


def matches(name: str, other: str) -> bool:
    """Whether a name is another one; in each, `<x>` stands for any text."""
    patterns = [re.sub(r"<\w+>", lambda _: r"[\w.<>-]+", re.escape(text)) for text in (name, other)]
    return bool(re.fullmatch(patterns[0], other) or re.fullmatch(patterns[1], name))


def undocumented(names: Iterable[str]) -> set[str]:
    """Those of the names that no row has."""
    rows = documented()
    return {name for name in names if name not in KEYS and not any(matches(name, row) for row in rows)}
