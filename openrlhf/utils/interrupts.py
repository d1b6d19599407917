"""Ctrl-C and SIGTERM as one thing that no library on the way can lose.

A signal handler raises where the program happens to be. Inside Ray's waits that exception may be dropped, so the
request is also remembered, and the loops that wait look at it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 2.0
"""How long a wait may go without looking."""

_requested: signal.Signals | None = None
_cleaning = threading.Event()


def requested() -> str | None:
    """Name of the signal that asked for the end, or None."""
    return None if _requested is None else _requested.name


def check() -> None:
    """Raise KeyboardInterrupt when the end was asked for and the exception of the handler got lost."""
    if _requested is not None and not _cleaning.is_set():
        raise KeyboardInterrupt(_requested.name)


@contextmanager
def handled() -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises KeyboardInterrupt; later ones are ignored."""
    global _requested
    _requested = None
    _cleaning.clear()
    before = {number: signal.signal(number, _handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Inside, :func:`check` lets calls through, so that processes can be ended in order."""
    _cleaning.set()
    try:
        yield
    finally:
        _cleaning.clear()


@contextmanager
def kept() -> Iterator[None]:
    """Put the present handlers back afterwards: libraries such as Ray replace them when they start."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(number: int, frame: FrameType | None) -> None:
    global _requested
    _requested = signal.Signals(number)
    # One is enough: the clean-up that it starts must not be interrupted by the next.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(_requested.name)
