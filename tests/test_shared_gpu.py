"""tests/gpu/shared: processes that take one GPU for several."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "gpu/shared"

SCRIPT = """
import json, os
seen = [os.environ["CUDA_VISIBLE_DEVICES"]]
for devices in (seen[0], "0,1", "1"):
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
os.environ.update( LOCAL_RANK="1", NCCL_HOSTID="the driver's", OTHER="1")
names = ("LOCAL_RANK", "NCCL_HOSTID", "OTHER", "RAY_OVERRIDE_RESOURCES")
print(json.dumps({"pid": os.getpid(), "seen": seen, **{name: os.environ[name] for name in names}}))
"""


def test_each_process_takes_the_first_gpu_and_is_a_host() -> None:
    sharing = {"PYTHONPATH": str(FOLDER), "SHARED_GPU": "4", "CUDA_VISIBLE_DEVICES": "1,2,3"}
    env = {**os.environ, **sharing, "LOCAL_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen.pop("NCCL_HOSTID") == f"process-{seen.pop('pid')}"
    assert json.loads(seen.pop("RAY_OVERRIDE_RESOURCES")) == {"GPU": 3}
    assert seen == {"seen": ["0,1,2", "0,1,2", "0", "0"], "LOCAL_RANK": "0", "OTHER": "1"}


def test_a_worker_of_an_engine_takes_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARED_GPU", raising=False)
    monkeypatch.setenv("NCCL_HOSTID", "of the process before the fork")
    spec = importlib.util.spec_from_file_location("shared_gpu", FOLDER / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Worker:
        def __init__(self) -> None:
            self.local_rank = 1
            self.parallel_config = SimpleNamespace(disable_custom_all_reduce=False)
            self.seen: tuple[Any, ...] = ()

        def init_device(self) -> None:
            self.seen = (self.local_rank, self.parallel_config.disable_custom_all_reduce, os.environ["NCCL_HOSTID"])

    module.change_worker(Worker)
    worker = Worker()
    worker.init_device()
    assert worker.seen == (0, True, f"process-{os.getpid()}")
