"""The process that vLLM's core is forked from: what forks have of whoever starts them, and that none outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
from forked_work import stay, tell
from process_ends import ends, lives
from vllm.v1.engine import utils

from openrlhf.engines.core_process import COMPATIBILITY_VARIABLE, METHOD_VARIABLE, CoreStart


def server() -> int:
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined,no-any-return]


def fork(start: CoreStart, target: Any) -> tuple[Any, Any]:
    """A process that vLLM would start, and what it says first."""
    here, there = multiprocessing.Pipe()
    with start.used():
        process = utils.get_mp_context().Process(target=target, args=(there,))
    process.start()
    assert here.poll(60)
    return process, here.recv()


@pytest.fixture
def torch_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreStart]:
    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("GOES", "1")
    start = CoreStart("torch")
    yield start
    start.close()


def test_a_fork_has_the_variables_of_its_start_and_not_of_its_server(
    torch_server: CoreStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("COMES", "2")
    monkeypatch.delenv("GOES")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    expected = {**os.environ, METHOD_VARIABLE: "spawn"}
    process, (environment, parent, threads) = fork(torch_server, tell)
    process.join(20)
    assert environment == expected and parent == server() and threads == 1
    assert METHOD_VARIABLE not in os.environ
    assert utils.get_mp_context.__module__ == "vllm.utils.system_utils"


def test_closing_ends_the_server_and_its_forks(torch_server: CoreStart) -> None:
    process, pid = fork(torch_server, stay)
    old = server()
    torch_server.close()
    assert ends(old) and ends(pid)
    process.join(20)
    assert not process.is_alive()
    torch_server.close()  # again does nothing
    another = CoreStart("torch")
    process, (_, parent, _) = fork(another, tell)
    assert parent not in (old, os.getpid())
    another.close()


@pytest.mark.parametrize("variable", [{METHOD_VARIABLE: "spawn"}, {COMPATIBILITY_VARIABLE: "1"}])
def test_a_user_who_has_chosen_or_needs_new_interpreters_gets_them(
    monkeypatch: pytest.MonkeyPatch, variable: dict[str, str]
) -> None:
    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    before, original = server(), utils.get_mp_context
    start = CoreStart()
    with start.used():
        assert utils.get_mp_context is original and server() == before
    start.close()


KILLED = """
from multiprocessing import forkserver
from openrlhf.engines.core_process import CoreStart
CoreStart()
print(forkserver._forkserver._forkserver_pid, flush=True)
input()
"""


@pytest.mark.parametrize("seconds", [1.0, 0.3])
def test_a_server_that_imports_dies_with_a_killed_engine(seconds: float) -> None:
    environment = {name: value for name, value in os.environ.items() if name != METHOD_VARIABLE}
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        time.sleep(seconds)
        assert lives(pid)
        engine.send_signal(signal.SIGKILL)
    assert ends(pid)


def test_an_engines_variables_are_set_before_torch_is_imported() -> None:
    told = "import sys, openrlhf.engines.vllm_engine; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True).stdout == "set()\n"
