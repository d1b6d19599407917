"""How many cores a process counts on."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from openrlhf.cli import common
from openrlhf.config import PPOConfig
from openrlhf.engines.spec import engine_spec
from openrlhf.rollout.rewards.math_check import MathChecker
from openrlhf.utils import process


@pytest.fixture
def bound_to_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by taskset, SLURM or a container, on a machine of 96 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(process, "_granted_cores", lambda: float("inf"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("granted", "cores"), [(float("inf"), 6), (2.5, 3), (0.5, 1), (64.0, 6)])
def test_bound_and_granted_cores(
    bound_to_six: None, monkeypatch: pytest.MonkeyPatch, granted: float, cores: int
) -> None:
    monkeypatch.setattr(process, "_granted_cores", lambda: granted)
    assert process.available_cores() == cores


def test_engines_and_checks_of_answers_share_the_bound_cores(bound_to_six: None) -> None:
    class Settings(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return 0

    cfg = cast(PPOConfig, Settings(vllm_num_engines=2, param_dtype="fp32"))
    spec = engine_spec(cfg, 0, device_type="cpu", weight_transport="gloo", log_file="")
    assert spec.environment["OMP_NUM_THREADS"] == "3"
    assert MathChecker()._idle.qsize() == 3


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/pod/worker", {"pod/cpu.max": "400000 100000", "pod/worker/cpu.max": "max 100000"}, 4.0),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/../outside", {"cpu.max": "max 100000"}, float("inf")),
        (
            "3:memory:/m\n2:cpu,cpuacct:/docker/1\n0::/",
            {"cpu/docker/1/cpu.cfs_quota_us": "800000", "cpu/docker/1/cpu.cfs_period_us": "100000"},
            8.0,
        ),
        ("1:cpu:/docker/1", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
    ],
)
def test_what_control_groups_grant(tmp_path: Path, groups: str, files: dict[str, str], cores: float) -> None:
    (tmp_path / "own").write_text(groups + "\n")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert process._granted_cores(tmp_path / "own", tmp_path / "root") == cores
    assert process._granted_cores(tmp_path / "missing", tmp_path / "root") == float("inf")


def test_memory_of_a_process_and_of_those_that_it_started() -> None:
    code = "block = bytearray(b'1' * (64 << 20)); print(len(block), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None and child.stdout.readline()
        alone, both = process.resident_bytes(), process.resident_bytes(children=True)
        child.communicate(b"\n", timeout=60)
    assert 1 << 20 < alone and both > alone + (64 << 20)


LEFT = """
import atexit, sys
from openrlhf.utils.process import leave

class Thread:
    def __del__(self):
        print("taken down")

thread = Thread()
atexit.register(print, "exit functions are called")
print("said", end=" ")
leave(3)
"""


def test_a_process_leaves_without_taking_the_interpreter_down() -> None:
    run = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (3, "said exit functions are called\n", "")


GROUPS = ("train_sft", "train_rm", "train_dpo", "train_kto", "batch_inference", "convert", "main")


@pytest.mark.parametrize("command", GROUPS)
def test_commands_that_join_a_process_group_leave_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(process, "leave", left.append)
    for name in ("train", "tool", "run_tool"):
        monkeypatch.setattr(common, name, lambda *_: 7)
    monkeypatch.setattr("openrlhf.config.parse_cli", lambda *_: SimpleNamespace(task="zero2hf"))
    monkeypatch.setattr("openrlhf.config.commands.nearest_command", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["openrlhf", "nothing"])
    monkeypatch.delitem(sys.modules, f"openrlhf.cli.{command}", raising=False)  # or runpy warns
    runpy.run_module(f"openrlhf.cli.{command}", run_name="__main__")
    assert left == [2 if command == "main" else 7]
