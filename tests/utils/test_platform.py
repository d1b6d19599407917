"""What the code believes about the hardware; here always a CPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openrlhf import platform


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENRLHF_DEVICE", "cpu")


def test_cpu_choices() -> None:
    assert platform.device_type() == "cpu" and platform.device(3) == torch.device("cpu")
    assert platform.dist_backend() == "gloo"
    assert not platform.fused_optimizer()


def test_gpu_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert platform.device(3) == torch.device("cuda", 3)
    assert "nccl" in platform.dist_backend() and "gloo" in platform.dist_backend()
    assert platform.fused_optimizer()


def test_cores_are_shared_by_the_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(platform, "available_cores", lambda: 6)
    try:
        platform.prepare_process()
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        platform.prepare_process()
        assert torch.get_num_threads() == 3, "the user's choice is left to OpenMP"
        platform.prepare_process(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("threads", [None, 3])
def test_a_share_of_the_cores_is_one_process_s_only(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int | None
) -> None:
    """Beside a GPU, too: the optimizer of --adam_offload runs there. The workers that vLLM starts have other shares.

    Of the launchers, deepspeed calls the number LOCAL_SIZE.
    """
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.setattr(platform, "device_type", lambda: device)
    monkeypatch.setattr(platform, "available_cores", lambda: 12)
    try:
        platform.prepare_process(threads)
        assert torch.get_num_threads() == 3 and "OMP_NUM_THREADS" not in os.environ
    finally:
        torch.set_num_threads(before)


def test_the_share_holds_for_extensions_that_use_openmp(tmp_path: Path) -> None:
    """DeepSpeed's optimizer for CPUs is one: it must get the OpenMP that torch has set, not one of its own."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    source, library = tmp_path / "team.cpp", tmp_path / "team.so"
    source.write_text('#include <omp.h>\nextern "C" int team() { return omp_get_max_threads(); }\n')
    subprocess.run([compiler, "-fopenmp", "-shared", "-fPIC", source, "-o", library], check=True, timeout=300)
    team = ctypes.CDLL(str(library)).team
    before = torch.get_num_threads()
    try:
        for threads in (5, 2):
            platform.prepare_process(threads)
            assert team() == threads
    finally:
        torch.set_num_threads(before)


def test_tools_beside_the_interpreter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    platform.prepare_process()
    assert os.environ["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)


def test_memory_figures() -> None:
    stats = platform.memory_stats()
    assert 0 < stats.allocated <= stats.total and 0 < stats.free <= stats.total
    assert 1 << 20 < stats.host <= stats.total
    assert "GiB free" in str(stats)
    platform.empty_cache()
    platform.reset_peak_memory()
    platform.synchronize()
