"""The syntax of data sources: ``[name=]path[@data_dir], path, ...``. Files are not opened here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_NAME = re.compile(r"(?P<name>[\w.-]+)\s*=(?P<rest>.+)")


@dataclass(frozen=True)
class Source:
    """One source of rows.

    Attributes:
        path: a file, a folder or a hub id.
        data_dir: what stood after an @; None if nothing did.
        name: what stood before a =, the datasource of its rows; None if nothing did.
    """

    path: str
    data_dir: str | None
    name: str | None = None

    @property
    def is_file(self) -> bool:
        """By its name, a single data file."""
        return Path(self.path).suffix in FILE_SUFFIXES

    @property
    def looks_local(self) -> bool:
        """By its name no hub id: a data file, or written as a path."""
        return self.is_file or looks_local(self.path)


def parse_sources(text: str) -> list[Source]:
    """Split a source list at its commas; blanks don't count."""
    sources = []
    for item in text.split(","):
        named = _NAME.fullmatch(item.strip())
        path, _, data_dir = (named["rest"] if named else item).partition("@")
        sources.append(Source(path.strip(), data_dir.strip() or None, named["name"] if named else None))
    return sources


def looks_local(name: str) -> bool:
    """`name` is written as a path, so it can't be meant as a hub id."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..")
