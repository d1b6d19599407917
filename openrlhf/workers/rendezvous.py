"""How the ranks of a role meet: over a store whose port the system chose and whose socket is never let go."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from openrlhf import platform
from openrlhf.utils.network import let_gloo_listen_towards

STORE_TIMEOUT = timedelta(seconds=600)


def open_store(host: str, world_size: int) -> dist.TCPStore:
    """Rank 0's store, listening on a free port (``store.port``)."""
    return dist.TCPStore(host, 0, world_size, is_master=True, timeout=STORE_TIMEOUT, wait_for_workers=False)


def join_group(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    join_timeout: float,
    timeout: float,
    store: dist.TCPStore | None = None,
) -> None:
    """Form the default process group.

    Args:
        rank: of this process.
        world_size: number of processes.
        host: where rank 0's store is.
        port: its port.
        join_timeout: seconds that reaching the store may take.
        timeout: seconds that any later collective may take, the first one of each communicator included.
        store: on rank 0, the store itself.
    """
    # DeepSpeed and libraries below it look these up, although the group already exists.
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    let_gloo_listen_towards(host)
    if store is None:
        reach = timedelta(seconds=join_timeout)
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=reach, wait_for_workers=False)
    limit = timedelta(seconds=timeout)
    # NCCL's communicators meet over the store when they are first used, which is long after the start.
    store.set_timeout(limit)
    dist.init_process_group(platform.dist_backend(), store=store, rank=rank, world_size=world_size, timeout=limit)
