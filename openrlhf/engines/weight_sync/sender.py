"""The sending side of a weight transfer: control calls to the engines, and an end when one of them fails."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from openrlhf import platform
from openrlhf.cluster.group import WorkerGroup
from openrlhf.engines.weight_sync import plugin
from openrlhf.utils.network import node_address
from openrlhf.utils.threads import in_daemon_thread

IPC_BUFFER_BYTES = 1024 * 1024 * 1024
"""Size of the one buffer of the ``ipc`` transport, which holds whole tensors: more where a single one is larger."""

NCCL_BUFFER_BYTES = 256 * 1024 * 1024
"""The ``nccl`` transport ends a chunk with the tensor that takes it past this size, at both ends alike.

Two chunks are on their way at once, on an engine's GPU beside the share that vLLM keeps to.
"""

T = TypeVar("T")

REASON_SECONDS = 5.0
"""A transport may notice sooner that an engine is gone than the call to the engine, which knows why."""


class EngineClient:
    """vLLM's weight-sync calls, sent to every engine at once.

    Args:
        engines: the engine actors.
        workers_per_engine: vLLM workers (tensor-parallel ranks) of each.

    Attributes:
        timeout: seconds that a call may take.
        weight_version: the number of the weights that are sent next.
        failure: holds the error of the first call that failed, from then on.
    """

    def __init__(self, engines: WorkerGroup, workers_per_engine: int) -> None:
        self._engines = engines
        self._workers_per_engine = workers_per_engine
        self.timeout = engines.timeout
        self.weight_version = 0
        self.failure: Future[None] = Future()

    def _call(self, method: str, *args: Any, per_rank: Sequence[Any] | None = None) -> None:
        try:
            self._engines.call(method, *args, per_rank=per_rank, timeout=self.timeout)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        requests = []
        for index in range(len(self._engines)):
            info = dict(init_info)
            if "rank_offset" in info:
                # Every engine counts its own workers from 0; the group needs them one after the other.
                info["rank_offset"] += index * self._workers_per_engine
            requests.append(WeightTransferInitRequest(init_info=info))
        self._call("init_weight_transfer_engine", per_rank=requests)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # vLLM's trainer engines pass no version on.
        self._call("finish_weight_update", self.weight_version)


def until_failure(work: Callable[[], T], failure: Future[None]) -> T:
    """Do work in a thread of its own, and leave it there when ``failure`` comes first.

    A broadcast that one of its receivers has left may never end, and nothing can interrupt it: the process must be
    ended after a failure, which ends the thread, too.
    """

    def run() -> T:
        platform.set_device()  # each thread has its own current device
        return work()

    outcome = in_daemon_thread(run, "weight transfer")
    ends: list[Future[Any]] = [outcome, failure]
    wait(ends, return_when=FIRST_COMPLETED)
    if outcome.done() and outcome.exception() is not None:
        wait([failure], timeout=REASON_SECONDS)
    if failure.done():
        failure.result()
    return outcome.result()


class WeightSender:
    """An actor rank's half of the weight transfer. All ranks send together; rank 0 meets the engines' workers."""

    def __init__(self, engine: TrainerWeightTransferEngine[Any], client: EngineClient) -> None:
        self._engine = engine
        self._client = client

    def send(self, version: int) -> None:
        """Send all weights to all engines under this version number.

        Raises:
            WorkerError: an engine failed or did not answer in time. No transfer is possible afterwards.
        """
        self._client.weight_version = version
        until_failure(self._engine.send_weights, self._client.failure)


def _init_info(transport: str, rank: int, workers: int, largest: int, timeout: float) -> TrainerInitInfo:
    if transport == "gloo":
        from openrlhf.engines.weight_sync.gloo import GlooTrainerInitInfo

        return GlooTrainerInitInfo(
            rank=rank, master_address=node_address(), world_size=1 + workers, timeout_seconds=timeout
        )
    if transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        buffer_bytes = max(IPC_BUFFER_BYTES, largest)
        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=buffer_bytes)
    from openrlhf.engines.weight_sync.nccl import HeldPortInitInfo

    return HeldPortInitInfo(
        rank=rank,
        master_address=node_address(),
        world_size=1 + workers,
        packed=True,
        packed_buffer_size_bytes=NCCL_BUFFER_BYTES,
    )


def open_sender(
    transport: str, source: WeightSource, engines: WorkerGroup, *, workers_per_engine: int, rank: int, timeout: float
) -> WeightSender:
    """Connect this actor rank to the engines. Called by every rank.

    Args:
        transport: "gloo", "ipc" or "nccl"; the engines were started with the same.
        source: what is sent each time.
        engines: the engine actors; each call of a transfer may take as long as the group's calls.
        workers_per_engine: vLLM workers of each engine.
        rank: this process's rank among the actor's ranks.
        timeout: seconds that connecting may take.

    Raises:
        WorkerError: an engine failed or did not answer in time.
    """
    plugin.register()
    # A larger tensor is nothing to worry about: it makes the last one of a larger chunk.
    warnings.filterwarnings("ignore", message="Tensor .* exceeds buffer_size_bytes")
    largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
    info = _init_info(transport, rank, len(engines) * workers_per_engine, largest, engines.timeout)
    client = EngineClient(engines, workers_per_engine)
    client.timeout = timeout
    connect = partial(WeightTransferTrainerFactory.trainer_init, info, client=client, source=source)
    engine = until_failure(connect, client.failure)
    client.timeout = engines.timeout
    return WeightSender(engine, client)
