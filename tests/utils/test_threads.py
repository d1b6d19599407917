"""Work in a thread that can be left behind."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from openrlhf.utils.threads import in_daemon_thread


def test_what_work_returns_or_raises_comes_in_the_future() -> None:
    assert in_daemon_thread(lambda: threading.current_thread().name, "own").result(60.0) == "own"

    def leave() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit):
        in_daemon_thread(leave, "leaves").result(60.0)


def test_a_thread_that_hangs_does_not_keep_a_process() -> None:
    code = (
        "import time; from openrlhf.utils.threads import in_daemon_thread as go; go(lambda: time.sleep(600), 'hangs')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
