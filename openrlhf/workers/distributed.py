"""The process group of one model: set up from the launcher's environment, with deadlines on every wait."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from openrlhf import platform
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.network import let_gloo_listen_towards
from openrlhf.workers.rendezvous import open_store

DEFAULT_TIMEOUT_S = 1800


class DistributedError(ExplainedError, RuntimeError):
    """Ranks did not meet in time, one failed at what all wait for, or the launcher's environment makes no sense."""


@dataclass(frozen=True)
class World:
    """This process's place among its peers."""

    rank: int
    size: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """True on rank 0, which logs and writes shared files."""
        return self.rank == 0


def init_distributed(local_rank: int = -1, timeout_s: float = DEFAULT_TIMEOUT_S) -> World:
    """Join the process group that torchrun, the deepspeed launcher or Ray describes in the environment.

    Without RANK and WORLD_SIZE (plain ``python -m``), a group of one process is made on a free port. Does nothing
    when the process already has a group.

    Args:
        local_rank: the ``--local_rank`` flag of the deepspeed launcher; -1 = read LOCAL_RANK.
        timeout_s: deadline of joining and of every later collective operation.

    Raises:
        DistributedError: the environment is incomplete, or the peers did not come.
        NetworkError: ranks of other nodes can't reach this one.
    """
    if local_rank >= 0:
        os.environ["LOCAL_RANK"] = str(local_rank)
    store = None
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        store = open_store("127.0.0.1", 1)  # keeps its port: one that is only looked up may be taken before its use
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    missing = [k for k in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise DistributedError(f"environment lacks {', '.join(missing)}; start with torchrun or deepspeed")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))
    platform.prepare_process()
    platform.set_device(local)
    if not dist.is_initialized():
        let_gloo_listen_towards(os.environ["MASTER_ADDR"], several_nodes=size > platform.local_processes(size))
        try:
            dist.init_process_group(
                platform.dist_backend(), store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise DistributedError(f"rank {rank} of {size} could not join the group at {address}: {error}") from error
    return World(rank, size, local)


def shutdown() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(what: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Wait until every rank is here.

    Raises:
        DistributedError: a rank did not come in time; names the wait and the rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    try:
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=timeout_s))
        else:
            all_reduce_sum([1.0])
    except RuntimeError as error:
        raise DistributedError(f"gave up waiting for the other ranks at {what!r}: {error}") from error


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Sum each number over all ranks, in float64."""
    # gloo serves CPU tensors on GPU machines, too, without a GPU synchronisation
    tensor = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor.tolist()


def any_rank(flag: bool) -> bool:
    """True on all ranks when it is true on one."""
    return all_reduce_sum([float(flag)])[0] > 0


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank (pickled)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_objects(own: Any) -> list[Any]:
    """Every rank's value (pickled), in the order of ranks, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def raise_together(problem: str, what: str, cause: Exception | None = None) -> None:
    """Let every rank fail when one did, instead of waiting for it; all ranks call it.

    Args:
        problem: of this rank; empty = none.
        what: the ranks do.
        cause: the error behind this rank's problem.

    Raises:
        DistributedError: a rank has a problem; of several, the first one's is told.
    """
    if not any_rank(bool(problem)):
        return
    told = gather_objects(problem)
    rank = next(rank for rank, text in enumerate(told) if text)
    raise DistributedError(f"{what} failed{f' on rank {rank}' if rank else ''}: {told[rank]}") from cause
