"""Rollouts on disk: one JSON-lines file per step, readable by people and by `read_rollout_dump`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.rollout.trajectory import Trajectory

_PATTERN = "rollout_step_{:08d}.jsonl"


class RolloutDumpWriter:
    """Writes the trajectories of each step into a folder of its own files.

    Args:
        directory: created if need be.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, trajectories: Iterable[Trajectory]) -> Path:
        """Writes one step and returns the file's path; a reader never sees half a file.

        Each line holds one trajectory: all fields of `Trajectory.to_dict`, plus "step", "text" (prompt and
        response) and "label".
        """
        path = self.directory / _PATTERN.format(step)
        handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=self.directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                for trajectory in trajectories:
                    record = _record(step, trajectory)
                    file.write(json.dumps(record, default=_plain, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path


def read_rollout_dump(path: str | os.PathLike[str]) -> list[Trajectory]:
    """Reads the trajectories of one dump file.

    Raises:
        ValueError: a line is not a trajectory record (its number is named).
    """
    trajectories = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                for derived in ("step", "text", "label"):
                    record.pop(derived)
                trajectories.append(Trajectory.from_dict(record))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                where = f"{os.fspath(path)} line {number}"
                raise ValueError(f"{where} is not a rollout record: {error!r}") from error
    return trajectories


def _record(step: int, trajectory: Trajectory) -> dict[str, Any]:
    facts = trajectory.metadata
    record = {
        "step": step,
        "text": str(facts.get("prompt", "")) + str(facts.get("response", "")),
        "label": facts.get("label", ""),
    }
    return {**record, **trajectory.to_dict()}


def _plain(value: Any) -> Any:
    """JSON form of metadata that is not plain: numbers and arrays exactly, anything else as its text."""
    if isinstance(value, (np.generic, np.ndarray)) or hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return str(value)
