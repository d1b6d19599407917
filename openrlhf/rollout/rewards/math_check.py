"""Comparing mathematical answers in child processes, each comparison with a deadline."""

from __future__ import annotations

import atexit
import os
import queue
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

from openrlhf.rollout.errors import RewardError
from openrlhf.utils.process import available_cores

_START_SECONDS = 60.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class MathTimeout(Exception):
    """A comparison did not end in time."""


class _Worker:
    """One child process."""

    def __init__(self) -> None:
        paths = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "openrlhf.rollout.rewards.math_worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                )
        except OSError as error:  # no memory, or too many processes or files
            raise RewardError(f"no process for math answers could be started: {error}") from error
        try:
            self._answer(_START_SECONDS)
        except (MathTimeout, EOFError, OSError) as error:
            self.kill()
            raise RewardError(
                "the process for math answers did not start; is the package math-verify installed?"
            ) from error

    def ask(self, gold: str, response: str, seconds: float) -> bool:
        self._pipe.send((gold, response))
        return self._answer(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _answer(self, seconds: float) -> bool:
        if not self._pipe.poll(seconds):
            raise MathTimeout
        return self._pipe.recv()


class MathChecker:
    """Compares answers with up to `workers` child processes, started when needed. Thread-safe.

    Args:
        workers: processes at most.
        timeout: seconds for one comparison; after it the process is killed and replaced.
    """

    def __init__(self, workers: int | None = None, timeout: float = 10.0) -> None:
        self._timeout = timeout
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers or max(1, min(8, available_cores() // 2))):
            self._idle.put(None)  # a place without a process yet
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()

    def same(self, gold: str, response: str) -> bool:
        """Tells whether the answer in `response` equals `gold`; what can't be parsed is not equal.

        Raises:
            MathTimeout: the comparison took longer than the limit.
            RewardError: no process could be started.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker()
                with self._lock:
                    self._all.add(worker)
            return worker.ask(gold, response, self._timeout)
        except (MathTimeout, EOFError, OSError) as error:
            if worker is not None:
                with self._lock:
                    self._all.discard(worker)
                worker.kill()
                worker = None
            raise MathTimeout(f"no verdict within {self._timeout:g} s") from error
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends all child processes."""
        with self._lock:
            workers, self._all = self._all, set()
        for worker in workers:
            worker.kill()


_shared: MathChecker | None = None
_shared_lock = threading.Lock()


def shared_checker() -> MathChecker:
    """The checker of this process, ended with it."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = MathChecker()
            atexit.register(_shared.close)
        return _shared
