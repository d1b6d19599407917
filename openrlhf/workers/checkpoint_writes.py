"""Writes of a checkpoint that all ranks hear of when they fail on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf.workers import checkpoint_files as files
from openrlhf.workers.distributed import raise_together


class Writes:
    """What the ranks write of one checkpoint.

    A failure is kept until the ranks meet: raised at once, it would leave the others in DeepSpeed's next collective.

    Args:
        target: the checkpoint.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._problem = ""

    def run(self, write: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Write, unless an earlier write of this rank failed."""
        if self._problem:
            return
        try:
            write(*args, **options)
        except (OSError, RuntimeError) as error:
            self._problem = files.write_problem(error, self._target)

    @contextmanager
    def of_deepspeed(self, engine: Any) -> Iterator[None]:
        """Inside, an engine's files are written by :meth:`run`."""
        replaced = [(engine.checkpoint_engine, "save"), (engine, "_copy_recovery_script")]
        for owner, name in replaced:
            setattr(owner, name, partial(self.run, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in replaced:
                delattr(owner, name)  # the class's own is there again

    def raise_together(self) -> None:
        """Meet the other ranks; all call it.

        Raises:
            DistributedError: a write failed on some rank.
        """
        raise_together(self._problem, f"writing checkpoint {self._target}")
