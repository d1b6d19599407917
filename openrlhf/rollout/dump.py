"""Rollouts on disk: one JSON-lines file per step, readable by people and by `read_rollout_dump`."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from openrlhf.rollout.errors import RolloutError
from openrlhf.rollout.trajectory import COLUMNS, Trajectory
from openrlhf.utils.files import atomic_file

logger = logging.getLogger(__name__)

KINDS = ("rollout", "eval")
_FILE = re.compile(r"(?P<kind>rollout|eval)_step_(?P<step>\d{8})\.jsonl")
_BEGIN = re.compile(rb'\{"step": \d+, "group_id": (\d+), ')
# Steps that may wait for the disk before training waits too.
_MAX_PENDING = 2


class DumpError(RolloutError):
    """A dump can't be written or read; the message names the file."""


class RolloutDumpWriter:
    """Writes the trajectories of each step into a folder of its own files.

    Args:
        directory: created if need be.
        max_bytes: limit of all files of the folder's dump together; None = no limit.
        complete: a step for which there is no room is an error. False: at the limit the files of the oldest steps are
            removed, and what :meth:`submit` can't write is told and counted.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_bytes: float | None = None, complete: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._complete = complete
        self._missing = 0
        self._thread = ThreadPoolExecutor(1, "rollout-dump")
        self._pending: deque[Future[Path]] = deque()

    def submit(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        baselines: Sequence[Trajectory] = (),
        *,
        kind: str = "rollout",
    ) -> None:
        """`write` in a thread; waits only while earlier steps are not on the disk yet.

        Raises:
            DumpError: an earlier step of a complete dump could not be written.
        """
        self._wait(_MAX_PENDING - 1)
        self._pending.append(self._thread.submit(self.write, step, trajectories, baselines, kind=kind))

    def close(self) -> None:
        """Waits until everything is written.

        Raises:
            DumpError: a step of a complete dump could not be written.
        """
        try:
            self._wait(0)
        finally:
            self._thread.shutdown()
            if self._missing:
                logger.warning("%s lacks %d files that could not be written", self.directory, self._missing)

    def _wait(self, pending: int) -> None:
        while len(self._pending) > pending:
            try:
                self._pending.popleft().result()
            except DumpError as error:
                if self._complete:
                    raise
                self._missing += 1
                if self._missing == 1:
                    logger.warning("%s. The run goes on; files will be missing", error)

    def write(
        self,
        step: int,
        trajectories: Iterable[Trajectory],
        baselines: Iterable[Trajectory] = (),
        *,
        kind: str = "rollout",
    ) -> Path:
        """Writes one step and returns the file's path; a reader never sees half a file.

        Each line holds one trajectory: all fields of `Trajectory.to_dict`, plus "step", "text" (prompt and
        response), "label", and "baseline" (a greedy response that is not trained on).

        Raises:
            DumpError: the disk refuses, or the limit is reached and old steps may not be removed.
        """
        path = self.directory / f"{kind}_step_{step:08d}.jsonl"
        try:
            with atomic_file(path) as file:
                for group, baseline in ((trajectories, False), (baselines, True)):
                    for trajectory in group:
                        file.write(_line(step, trajectory, baseline))
                file.flush()
                self._make_room(path, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise DumpError(f"the rollout dump {path} can't be written: {error}") from error
        return path

    def _make_room(self, path: Path, size: int) -> None:
        """Removes the oldest steps until a file of `size` bytes fits; it is written even if it alone is over."""
        if self._max_bytes is None:
            return
        others = [other for other in dump_files(self.directory, KINDS) if other != path]
        total = size + sum(other.stat().st_size for other in others)
        for oldest in others:
            if total <= self._max_bytes:
                return
            limit = f"{self._max_bytes / 2**30:g} GiB (--dump_max_gib)"
            if self._complete:
                raise DumpError(f"{path} would take the dump over its limit of {limit}; raise it, or use --max_steps")
            logger.warning("%s was removed: the rollout dump is limited to %s", oldest, limit)
            total -= oldest.stat().st_size
            oldest.unlink()


def dump_files(path: str | os.PathLike[str], kinds: Sequence[str] = ("rollout",)) -> list[Path]:
    """The files of a dump in the order of their steps: those of a folder, or the one file that is named."""
    place = Path(path)
    if place.is_file():
        return [place]
    matches = ((_FILE.fullmatch(file.name), file) for file in place.glob("*.jsonl"))
    found = [(match["step"], match["kind"], file) for match, file in matches if match and match["kind"] in kinds]
    return [file for _, _, file in sorted(found)]


def count_groups(path: str | os.PathLike[str]) -> int:
    """Number of groups in one dump file, from the beginnings of its lines.

    Raises:
        DumpError: a line does not begin like a record.
    """
    groups = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            begin = _BEGIN.match(line)
            if begin is None:
                raise DumpError(f"{os.fspath(path)} line {number} is not a rollout record: {line[:60]!r}")
            groups.add(begin[1])
    return len(groups)


def read_rollout_dump(path: str | os.PathLike[str]) -> tuple[list[Trajectory], list[Trajectory]]:
    """Reads one dump file.

    Returns:
        The trajectories, and the greedy responses that they are compared with (ReMax).

    Raises:
        DumpError: a line is not a trajectory record (its number is named), or the file can't be read.
    """
    samples: list[Trajectory] = []
    baselines: list[Trajectory] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = json.loads(line)
                    for derived in ("step", "text", "label"):
                        record.pop(derived)
                    (baselines if record.pop("baseline", False) else samples).append(Trajectory.from_dict(record))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    where = f"{os.fspath(path)} line {number}"
                    raise DumpError(f"{where} is not a rollout record: {error!r}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DumpError(f"the rollout dump {os.fspath(path)} can't be read: {error}") from error
    return samples, baselines


def _line(step: int, trajectory: Trajectory, baseline: bool) -> str:
    facts = trajectory.metadata
    record = {
        "step": step,
        "group_id": trajectory.group_id,
        "text": str(facts.get("prompt", "")) + str(facts.get("response", "")),
        "label": facts.get("label", ""),
        "baseline": baseline,
        **trajectory.to_dict(),
    }
    # millions of numbers, for which the encoder of json takes ten times as long
    columns = {name: record[name] for name in COLUMNS if record[name] is not None}
    plain = _encoder.encode({name: value for name, value in record.items() if name not in columns})
    numbers = (f', "{name}": {msgspec.json.encode(value).decode()}' for name, value in columns.items())
    return f"{plain[:-1]}{''.join(numbers)}}}\n"


def _plain(value: Any) -> Any:
    """JSON form of metadata that is not plain: numbers and arrays exactly, anything else as its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return str(value)


_encoder = json.JSONEncoder(default=_plain, ensure_ascii=False)
