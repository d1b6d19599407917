"""Opens the trainer half of a weight transfer, and the control calls that go with it, with deadlines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from openrlhf.engines.weight_sync import plugin
from openrlhf.utils.process import free_port, host_address

if TYPE_CHECKING:
    from ray.actor import ActorHandle

PACKED_BUFFER_BYTES = 1024 * 1024 * 1024
"""Size of the staging buffer of the CUDA transports; grows with a larger single tensor."""


class WeightSyncError(RuntimeError):
    """A weight transfer failed or did not finish in time; names the step and the engine."""


@dataclass
class EngineClient:
    """vLLM's weight-sync calls, sent to every engine actor at once.

    Args:
        handles: the engine actors.
        workers_per_engine: vLLM workers (tensor-parallel ranks) of each.
        timeout: seconds that one call may take.
        weight_version: the number of the weights that are sent next.
    """

    handles: Sequence[ActorHandle]
    workers_per_engine: int
    timeout: float
    weight_version: int = 0

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        calls = [getattr(handle, method).remote(*args) for handle, args in zip(self.handles, arguments, strict=True)]
        pending = {call: index for index, call in enumerate(calls)}
        done, late = ray.wait(calls, num_returns=len(calls), timeout=self.timeout)
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                raise WeightSyncError(f"{method} failed in engine {pending[call]}: {error}") from error
        if late:
            names = ", ".join(str(pending[call]) for call in late)
            raise WeightSyncError(f"{method} did not finish in engine {names} within {self.timeout:g} s")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        requests = []
        for index in range(len(self.handles)):
            info = dict(init_info)
            if "rank_offset" in info:
                # Every engine counts its own workers from 0; the group needs them one after the other.
                info["rank_offset"] += index * self.workers_per_engine
            requests.append((WeightTransferInitRequest(init_info=info),))
        self._call("init_weight_transfer_engine", requests)

    def start_weight_update(self) -> None:
        self._call("start_weight_update", [()] * len(self.handles))

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        request = WeightTransferUpdateRequest(update_info=update_info)
        self._call("update_weights", [(request,)] * len(self.handles))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # vLLM's trainer engines pass no version on.
        self._call("finish_weight_update", [(self.weight_version,)] * len(self.handles))


def _init_info(transport: str, rank: int, workers: int, largest: int, timeout: float) -> TrainerInitInfo:
    buffer_bytes = max(PACKED_BUFFER_BYTES, largest)
    if transport == "gloo":
        from openrlhf.engines.weight_sync.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(
            rank=rank, master_address=host_address(), world_size=1 + workers, timeout_seconds=timeout
        )
    if transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
    if transport == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=rank,
            master_address=host_address(),
            master_port=free_port(),
            world_size=1 + workers,
            packed=True,
            packed_buffer_size_bytes=buffer_bytes,
        )
    raise ValueError(f"unknown weight transport {transport!r}; known: gloo, ipc, nccl")


def open_sender(
    transport: str,
    source: WeightSource,
    handles: Sequence[ActorHandle],
    *,
    workers_per_engine: int,
    rank: int,
    timeout: float,
) -> TrainerWeightTransferEngine[Any]:
    """Connect this actor rank to the engines. Called by every rank; rank 0 meets the engines' workers.

    Args:
        transport: "gloo", "ipc" or "nccl"; the engines were started with the same.
        source: what is sent at each ``send_weights()``.
        handles: the engine actors.
        workers_per_engine: vLLM workers of each engine.
        rank: this process's rank among the actor's ranks.
        timeout: seconds that each call to the engines may take.

    Raises:
        WeightSyncError: an engine failed or did not answer in time.
    """
    plugin.register()
    largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
    info = _init_info(transport, rank, len(handles) * workers_per_engine, largest, timeout)
    client = EngineClient(handles, workers_per_engine, timeout)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
