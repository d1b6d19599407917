"""Ctrl-C and SIGTERM as one thing that no library on the way can lose.

A signal handler raises where the program happens to be. Inside Ray's waits that exception may be dropped, so the
request is also remembered, and the loops that wait look at it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 2.0
"""How long a wait may go without looking."""
END_SECONDS = 20.0
"""After a signal, how long the ordered end may take; SLURM kills 30 s after its SIGTERM."""
STATUS = 130

_requested: signal.Signals | None = None
_failure: BaseException | None = None
_cleaning = threading.Event()
_hopeless: Callable[[], bool] | None = None
_over = threading.Event()


def requested() -> str | None:
    """Name of the signal that asked for the end, or None."""
    return None if _requested is None else _requested.name


def check() -> None:
    """Raise what ends the run: a failure elsewhere, or KeyboardInterrupt when the handler's exception got lost."""
    if _cleaning.is_set():
        return
    if _failure is not None:
        raise _failure
    if _requested is not None:
        raise KeyboardInterrupt(_requested.name)


def fail(error: BaseException) -> None:
    """For a thread that can't go on: every wait of the run ends with this error."""
    global _failure
    _failure = error


@contextmanager
def handled(hopeless: Callable[[], bool] | None = None) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM raises KeyboardInterrupt; later ones are ignored.

    What does not end within ``END_SECONDS`` of the signal is ended.

    Args:
        hopeless: asked twice a second after the signal; True = what the ordered end needs is gone, end at once.
    """
    global _requested, _failure, _hopeless, _over
    _requested = _failure = None
    _hopeless, _over = hopeless, threading.Event()
    _cleaning.clear()
    before = {number: signal.signal(number, _handle) for number in SIGNALS}
    try:
        yield
    finally:
        _over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def report() -> None:
    """Say that a signal ended the run."""
    print(
        f"\ninterrupted ({requested() or 'SIGINT'}); all processes of this run were ended", file=sys.stderr, flush=True
    )


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
    threading.Thread(target=_end_in_time, args=(_hopeless, _over), daemon=True).start()
    raise KeyboardInterrupt(_requested.name)


def _end_in_time(hopeless: Callable[[], bool] | None, over: threading.Event) -> None:
    """A signal to all processes of a job also ends those that the ordered end has to call, and waits for."""
    deadline = time.monotonic() + END_SECONDS
    while not over.wait(0.5):
        if time.monotonic() > deadline or (hopeless is not None and hopeless()):
            report()
            sys.stdout.flush()
            os._exit(STATUS)
