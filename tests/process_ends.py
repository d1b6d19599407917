"""Whether a process has ended, for tests that leave none behind."""

from __future__ import annotations

import time

import psutil


def lives(pid: int) -> bool:
    """Whether a process is more than an entry in the table: whoever inherits it may take a moment to notice its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int, patience: float = 30.0) -> bool:
    """Whether a process ends within so many seconds."""
    deadline = time.monotonic() + patience
    while lives(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
