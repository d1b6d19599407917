"""An event loop for tests of time limits, on whose clock a busy machine makes nobody late."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.01


class _Selector(selectors.DefaultSelector):
    """Counts the time in which nothing happened, at most ``LOOK_SECONDS`` of it between two looks."""

    idle = 0.0

    def select(self, timeout: float | None = None) -> Any:
        look = LOOK_SECONDS if timeout is None else max(0.0, min(timeout, LOOK_SECONDS))
        started = time.monotonic()
        events = super().select(look)
        if not events:
            self.idle += min(look, time.monotonic() - started)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._idle_selector = _Selector()
        super().__init__(self._idle_selector)

    def time(self) -> float:
        return self._idle_selector.idle


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run, with time that passes only while the loop has nothing to do.

    Waits take as long as they do otherwise. But neither a process that stands still for some seconds nor slow code
    brings a deadline nearer: it comes when those who could answer in time had the time to.
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
