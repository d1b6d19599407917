"""Settings of the whole suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Nothing is fetched, and small tensors gain nothing from a second thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs beside the interpreter (ninja, ray) are found without an activated environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

_status = 0

# Folders whose end-to-end tests start whole runs: many processes each, of which a machine should hold one set.
WHOLE_RUNS = ("e2e", "examples")


def pytest_configure(config: pytest.Config) -> None:
    """Where pytest-xdist is not installed its marker is unknown, and does nothing."""
    config.addinivalue_line("markers", "xdist_group(name): tests that share a process")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (pytest-xdist), a file's tests share their fixtures in one process; the long files start first.

    Whole runs come one after the other, beside all else.
    """
    runs, long = set(), set()
    for item in items:
        if item.get_closest_marker("e2e") and item.path.parent.name in WHOLE_RUNS:
            item.add_marker(pytest.mark.xdist_group("whole runs"))
            runs.add(item)
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
        if item.get_closest_marker("e2e") or item.get_closest_marker("slow"):
            long.add(item.path)
    items.sort(key=lambda item: (item not in runs, item.path not in long))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember how the suite ended, for the exit below."""
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without tearing the interpreter down: vLLM's, Ray's and torch's native threads can crash there.

    All fixtures are finished and the summary is printed; only the exit status is left to give.
    """
    if hasattr(config, "workerinput"):
        return  # one of several processes: its results are still on their way
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
