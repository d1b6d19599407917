"""Comparing mathematical answers in child processes, each comparison with a deadline."""

from __future__ import annotations

import atexit
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.rollout.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._pending = b""
        try:
            self._read(_START_SECONDS)
        except (MathTimeout, EOFError) as error:
            self.kill()
            raise RewardError(
                "the process for math answers did not start; is the package math-verify installed?"
            ) from error

    def ask(self, request: dict[str, str], seconds: float) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(request).encode() + b"\n")
        stdin.flush()
        return self._read(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise MathTimeout
                chunk = os.read(stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)


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
            reply = worker.ask({"gold": gold, "response": response}, self._timeout)
            return bool(reply.get("same", False))
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
