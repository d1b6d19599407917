"""Work that may hang, in a thread that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start work in a thread of its own; what it returns or raises comes in the future.

    A thread that hangs can be given up, and does not keep the process from ending. Those of a pool are joined at exit.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who waits may be cancelled, the thread can't be

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
