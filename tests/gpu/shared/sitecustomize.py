"""One GPU stands for several: Python imports this at the start of each process that has this folder on PYTHONPATH.

With SHARED_GPU=2, or one for each in CUDA_VISIBLE_DEVICES, Ray counts two GPUs, every process that gets one of them
takes the first GPU, and NCCL carries what the ranks send each other, through sockets. So what several GPUs compute can
be tested on one; how fast they would be, and what each of them holds, can't.

Ranks on one GPU can't be told apart by it: with CUDA IPC all engines read what one rank offers, and what the others
offer stays allocated, a GiB a sync. So runs must be short.

NCCL refuses two ranks on one GPU of one host, so each process says that it is a host of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

WORKER = "vllm.v1.worker.gpu_worker"


def host() -> str:
    """What NCCL takes for the host of this process."""
    return f"process-{os.getpid()}"


class VLLMWorkers(MetaPathFinder):
    """The workers of a tensor-parallel engine take a GPU by their rank, and then map each other's memory."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Of vLLM's module of workers, the one that is changed after it has run."""
        spec = PathFinder.find_spec(fullname, path) if fullname == WORKER else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run(module)
                change_worker(module.Worker)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def change_worker(worker: type[Any]) -> None:
    """Let all of an engine's workers take the first GPU, and NCCL add up what they have."""
    original = worker.init_device

    def init_device(self: Any) -> None:
        os.environ["NCCL_HOSTID"] = host()  # this may be a fork
        self.local_rank = 0
        self.parallel_config.disable_custom_all_reduce = True
        original(self)

    worker.init_device = init_device


def share_gpu(count: int) -> None:
    """Make this process one of those that share."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        count = len(visible.split(","))
        visible = ",".join(map(str, range(count)))  # CUDA takes those before the first that is missing
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ.update(NCCL_HOSTID=host(), RAY_OVERRIDE_RESOURCES=json.dumps({"GPU": count}))
    os.environ.update(VLLM_ALLREDUCE_USE_SYMM_MEM="0", VLLM_ALLREDUCE_USE_FLASHINFER="0")
    if "LOCAL_RANK" in os.environ:
        os.environ["LOCAL_RANK"] = "0"
    sys.meta_path.insert(0, VLLMWorkers())

    # What Ray and the project's processes set later: which GPU they have, and what the driver forwarded.
    kept = {"CUDA_VISIBLE_DEVICES": lambda: "0", "LOCAL_RANK": lambda: "0", "NCCL_HOSTID": host}
    set_variable = os._Environ.__setitem__

    def __setitem__(self: Any, name: str, value: str) -> None:
        # Ray counts what was visible at the start, and some libraries set all variables again to what they were.
        set_variable(self, name, kept[name]() if value and value != visible and name in kept else value)

    os._Environ.__setitem__ = __setitem__  # type: ignore[method-assign]


if "SHARED_GPU" in os.environ:
    share_gpu(int(os.environ["SHARED_GPU"]))
