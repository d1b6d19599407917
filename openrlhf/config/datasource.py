"""Data flags: sources (``[name=]path[@data_dir], path, ...``), splits and probabilities. Files are not opened here."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf.config.problems import FlagValueError

FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
_SPLIT = re.compile(r"^(?P<name>[^\[\]]+?)\s*(?:\[(?P<start>-?\d*%?):(?P<stop>-?\d*%?)\])?$")
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


def check_source(source: Source) -> None:
    """Refuse what can't be read, as far as names tell.

    Raises:
        FlagValueError: no path, a loading script, a file of another type, or nothing is there.
    """
    path = Path(source.path)
    if not source.path:
        raise FlagValueError("has an empty source between its commas", "remove the extra comma")
    if path.suffix == ".py" or (path / f"{path.name}.py").is_file():
        raise FlagValueError(
            f"{source.path} is a loading script: data sets are no longer loaded by scripts",
            "convert it to JSON lines or Parquet",
        )
    if path.is_dir():
        return
    named_as_file = path.suffix.lower() in (".txt", *FILE_SUFFIXES)
    if (named_as_file or path.is_file()) and path.suffix not in FILE_SUFFIXES:
        problem = f"{source.path}: files end in one of {', '.join(FILE_SUFFIXES)}, in lower case"
        raise FlagValueError(problem, "rename or convert the file")
    # a hub id has one slash
    if (named_as_file or looks_local(source.path) or source.path.count("/") > 1) and not path.exists():
        what = f"file {source.path}" if named_as_file else source.path
        raise FlagValueError(f"there is no {what} here ({os.getcwd()})", f"check the path; {_neighbours(path)}")


def _neighbours(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f"there is no folder {str(parent)!r}"
    names = sorted(p.name for p in parent.iterdir() if not p.name.startswith("."))[:10]
    return f"{str(parent)!r} has: {', '.join(names) or 'nothing'}"


def split_parts(text: str) -> re.Match[str]:
    """Name, start and stop of a split, or of a slice of it: ``train``, ``train[:5%]``, ``train[100:200]``.

    Raises:
        FlagValueError: it is neither.
    """
    parts = _SPLIT.match(text.strip())
    if parts is None:
        raise FlagValueError(f"{text!r} is no split and no slice of one", "write train, train[:5%] or train[100:200]")
    return parts


def check_split(text: str, sources: Sequence[Source]) -> None:
    """Refuse what is no split, or one that a file among the sources can't have.

    Raises:
        FlagValueError: tells which.
    """
    name = split_parts(text)["name"]
    file = next((source.path for source in sources if source.is_file), None)
    if file is not None and name != "train":
        raise FlagValueError(f"{name!r} isn't in {file}: a single file has only the split train", "use train")


def parse_probabilities(text: str, count: int) -> list[float]:
    """The sampling probabilities of `count` sources, above 0 and with a sum of 1.

    Raises:
        FlagValueError: they aren't.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise FlagValueError(f"{text!r} is no list of numbers", "write for example 0.3,0.7") from None
    if len(values) != count:
        raise FlagValueError(f"has {len(values)} numbers for {count} sources", "give one for each source")
    if min(values) <= 0:
        raise FlagValueError(f"{text}: a probability must be above 0", "leave the source out")
    if abs(sum(values) - 1) > 1e-6:
        raise FlagValueError(f"{text}: probabilities sum to 1, these to {sum(values):g}", "divide them by their sum")
    return [value / sum(values) for value in values]  # NumPy wants the sum more exactly than people write thirds
