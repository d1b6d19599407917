"""What hardware this process runs on. The only module that asks.

Everything else takes its device, communication backend, attention kernel and weight transport from here, so a
laptop CPU and a GPU cluster run the same code.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from openrlhf.utils.process import THREADS, available_cores, resident_bytes


def device_type() -> str:
    """``"cuda"`` when this process sees a GPU, else ``"cpu"``. ``OPENRLHF_DEVICE=cpu`` hides the GPUs."""
    if os.environ.get("OPENRLHF_DEVICE", "").lower() == "cpu":
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def device(local_rank: int = 0) -> torch.device:
    """The device of a process; on GPUs, the one of its local rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def set_device(local_rank: int = 0) -> torch.device:
    """Make the process's device current and return it."""
    chosen = device(local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def device_count() -> int:
    """GPUs this process sees; 1 on a CPU."""
    return torch.cuda.device_count() if device_type() == "cuda" else 1


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA's number for what a device can do: (8, 0) is an A100, (9, 0) an H100; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def dist_backend() -> str:
    """torch.distributed backend of training: NCCL for GPU tensors (with gloo for CPU tensors), gloo on a CPU."""
    return "cpu:gloo,cuda:nccl" if device_type() == "cuda" else "gloo"


def fused_optimizer() -> bool:
    """Whether torch's fused AdamW kernel can be used."""
    return device_type() == "cuda"


def prepare_process(threads: int | None = None) -> None:
    """Set what must be set before models are built: CPU threads, and the folder of ninja on PATH.

    DeepSpeed compiles small C++ helpers on a CPU and calls ``ninja`` by name; it is installed beside the
    interpreter, which a venv that was not activated leaves off PATH.

    Args:
        threads: intra-op threads of this process; None = the cores divided by the processes on this host
            (:func:`local_processes`), unless ``OMP_NUM_THREADS`` is set.
    """
    bin_dir = os.path.dirname(sys.executable)
    paths = os.environ.get("PATH", "").split(os.pathsep)
    if bin_dir not in paths:
        os.environ["PATH"] = os.pathsep.join([bin_dir, *paths])
    # DeepSpeed's use of torch.distributed, not ours to change
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Also beside a GPU: the optimizer of --adam_offload is CPU work, by the OpenMP that torch has loaded. The variable
    # stays as it is: processes that this one starts have their own shares, and vLLM's choose theirs only without it.
    if threads is None and THREADS not in os.environ:
        threads = max(1, available_cores() // local_processes())
    if threads is not None:
        torch.set_num_threads(threads)


def local_processes(default: int = 1) -> int:
    """Processes of the run on this host, by what torchrun or the deepspeed launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or default)


def empty_cache() -> None:
    """Give cached GPU memory back to the driver, so that another process on the GPU can have it."""
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU work of this process."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


@contextmanager
def on_default_stream() -> Iterator[None]:
    """Inside, GPU work goes to the default stream, whichever is current outside; afterwards it is done."""
    if device_type() != "cuda":
        yield
        return
    stream = torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def used_on_current_stream(tensor: torch.Tensor) -> None:
    """Let nobody have the memory of a tensor, once it is freed, before the current stream has done its work with it.

    Without this only the stream that made the tensor counts.
    """
    if device_type() == "cuda":
        tensor.record_stream(torch.cuda.current_stream())


@dataclass(frozen=True)
class MemoryStats:
    """Memory of this process in bytes. On a CPU, resident memory; ``total`` is the machine's.

    ``host`` is the resident memory, also where the others are a GPU's.
    """

    allocated: int
    reserved: int
    peak: int
    free: int
    total: int
    host: int

    def __str__(self) -> str:
        gib = 1 << 30
        return (
            f"{self.allocated / gib:.2f} GiB used (peak {self.peak / gib:.2f}), "
            f"{self.free / gib:.2f} of {self.total / gib:.2f} GiB free"
        )


def memory_stats() -> MemoryStats:
    """Current memory figures of this process and its device."""
    host = resident_bytes()
    if device_type() == "cuda":
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
        return MemoryStats(*own, free, total, host)
    import psutil

    machine = psutil.virtual_memory()
    return MemoryStats(host, host, host, machine.available, machine.total, host)


def reset_peak_memory() -> None:
    """Start the peak of :func:`memory_stats` anew."""
    if device_type() == "cuda":
        torch.cuda.reset_peak_memory_stats()
