"""Operating-system odds and ends of a process: where its output goes, and who it dies with."""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1

THREADS = "OMP_NUM_THREADS"


def redirect_output(path: str | Path) -> None:
    """Send this process's stdout and stderr, and those of its future children, to a file (appending)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # Ray replaces sys.stdout by a stream onto its own log file; write to the descriptors again.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, so that a killed engine leaves no orphan (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def unlink_shared_resources() -> None:
    """Remove the named semaphores and shared memory that this process and its dead children have open.

    Python's resource tracker does that when the process ends; but Ray kills the children of an actor together with
    it, the tracker among them. Stopping the tracker makes it do its work now.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def leave(status: int) -> NoReturn:
    """End this process: its exit functions are called, but the interpreter is not taken down.

    Of a training, process groups outlive the engine that used them (torch.distributed can't end them while DeepSpeed
    refers to them). Their threads, when the interpreter frees them last, now and then abort the process, and a training
    that went well would be one that failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def tail(path: str | Path) -> str:
    """The last 25 lines of a text file; an explanation in brackets when it can't be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return f"({path}: {error.strerror})"
    return "\n".join(text.splitlines()[-25:])


def resident_bytes(children: bool = False) -> int:
    """Host memory of this process, and of those that it has started; pages that they share count for each."""
    import psutil

    own = psutil.Process()
    total = 0
    for process in [own, *(own.children(recursive=True) if children else [])]:
        with suppress(psutil.Error):  # it has ended meanwhile
            total += process.memory_info().rss
    return total


def available_cores() -> int:
    """CPU cores this process may use: those it is bound to, and no more than its container has CPU time for."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(bound, _granted_cores())))


def _granted_cores(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU time per time that this process's control groups (of version 1 or 2) and those above them grant."""
    granted = math.inf
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return granted
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            granted = min(granted, _granted_by(folder))
            if folder == top:
                break
    return granted


def _granted_by(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)
    except (OSError, ValueError):  # no limit there, or not to be seen from within a container
        return math.inf


def job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``ray job submit`` was told to set; none outside of a job."""
    job = json.loads(environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    return (job.get("runtime_env") or {}).get("env_vars") or {}


def chosen_threads(environ: Mapping[str, str]) -> str | None:
    """OMP_NUM_THREADS, where somebody chose it: in the command of a job Ray sets it to 1."""
    threads = environ.get(THREADS) or None
    by_ray = threads == "1" and "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ and THREADS not in job_variables(environ)
    return None if by_ray else threads


def seed_process(seed: int, full_determinism: bool) -> None:
    """Seed Python, NumPy and torch, and with ``--full_determinism`` choose kernels that repeat themselves.

    Done before a model is loaded: new heads and adapters are random, and cuBLAS reads its part of it once.
    """
    from transformers import enable_full_determinism, set_seed

    if full_determinism:
        enable_full_determinism(seed)
    else:
        set_seed(seed)
