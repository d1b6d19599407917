"""The syntax of data sources, ``[name=]path[@data_dir], path, ...``, and of splits. Files are not opened here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
SPLIT = re.compile(r"^(?P<name>[^\[\]]+?)\s*(?:\[(?P<start>-?\d*%?):(?P<stop>-?\d*%?)\])?$")
"""A split, or a slice of it: ``train``, ``train[:5%]``, ``train[100:200]``."""
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
        """By its name, a single data file; Spark writes folders of such names."""
        return Path(self.path).suffix in FILE_SUFFIXES and not os.path.isdir(self.path)

    @property
    def looks_local(self) -> bool:
        """By its name no hub id: a data file, or written as a path."""
        return self.is_file or looks_local(self.path)


def parse_sources(text: str) -> list[Source]:
    """Split a source list at its commas; blanks don't count. A path that exists is that path, also with = or @."""
    return [_parse_source(item.strip()) for item in text.split(",")]


def _parse_source(item: str) -> Source:
    named = None if os.path.exists(item) else _NAME.fullmatch(item)
    rest = named["rest"].strip() if named else item
    path, _, data_dir = (rest, "", "") if os.path.exists(rest) else rest.partition("@")
    return Source(path.strip(), data_dir.strip() or None, named["name"] if named else None)


def looks_local(name: str) -> bool:
    """`name` is written as a path, so it can't be meant as a hub id."""
    return name.startswith(("/", "./", "../", "~")) or name in (".", "..")
