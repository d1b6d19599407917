"""Weight transfer over gloo: the transport for machines without GPUs.

Two halves, as vLLM's API wants them: the worker half lives in every vLLM worker process and receives, the
trainer half lives in every actor rank, where rank 0 sends. They meet in a gloo group of their own whose rank 0
is the sender. Weights arrive in checkpoint format, so vLLM's layerwise reload runs around the transfer: the CPU
build of vLLM repacks weights after loading, and a plain ``load_weights`` would write into the packed copies.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore
from vllm.distributed.utils import init_gloo_process_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from openrlhf.batching.buckets import in_buckets
from openrlhf.engines.weight_sync.layout import TensorMeta, pack, unpack
from openrlhf.engines.weight_sync.plugin import pack_again
from openrlhf.utils.network import let_gloo_listen_towards

SENDER = 0


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """What a vLLM worker needs to join the transfer group."""

    master_address: str
    master_port: int
    rank_offset: int
    """Group rank of this engine's first worker; rank 0 is the trainer."""
    world_size: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What one transfer carries, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def metas(self) -> list[TensorMeta]:
        return [
            TensorMeta(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        ]


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):
    """What an actor rank needs; only rank 0 opens the group."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    world_size: int
    """The sender and all vLLM workers."""
    timeout_seconds: float


def _join(store: TCPStore, rank: int, world_size: int, timeout: datetime.timedelta) -> ProcessGroup:
    let_gloo_listen_towards(store.host)
    return init_gloo_process_group(
        prefix_store=PrefixStore("openrlhf_weight_sync", store), group_rank=rank, group_size=world_size, timeout=timeout
    )


def _broadcast(group: ProcessGroup, buffer: torch.Tensor) -> None:
    group.broadcast(buffer, SENDER).wait()


def _packed(stream: Iterator[tuple[str, torch.Tensor]], names: list[str]) -> torch.Tensor:
    """The next tensors of a source on the CPU, as one; nothing else of them stays."""
    tensors = []
    for expected in names:
        name, tensor = next(stream)
        if name != expected:
            raise RuntimeError(f"the source yielded {name!r} where {expected!r} was announced")
        tensors.append(tensor)
    return pack(tensors).cpu()


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """The receiving half, in a vLLM worker."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        timeout = datetime.timedelta(seconds=init_info.timeout_seconds)
        store = TCPStore(
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = _join(store, rank, init_info.world_size, timeout)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator afterwards; here a broadcast is done when it returns.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("weights were sent before the transfer group was opened")
        for bucket in in_buckets(update_info.metas()):
            buffer = torch.empty(sum(meta.nbytes for meta in bucket), dtype=torch.uint8)
            _broadcast(self.group, buffer)
            self.model.load_weights(unpack(buffer, bucket))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)

    def shutdown(self) -> None:
        self.group = None


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine[GlooTrainerInitInfo]):
    """The sending half, in an actor rank. All ranks walk the source; rank 0 sends."""

    init_info_cls = GlooTrainerInitInfo

    def __init__(self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.group: ProcessGroup | None = None
        self._store: TCPStore | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> GlooTrainerWeightTransferEngine:
        if source is None:
            raise ValueError("the gloo weight transfer needs a weight source")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._open(init_info)
        return engine

    def _open(self, init_info: GlooTrainerInitInfo) -> None:
        timeout = datetime.timedelta(seconds=init_info.timeout_seconds)
        # Port 0: the store keeps the socket that the system chose, so nobody can take the port in between.
        store = TCPStore(
            init_info.master_address, 0, init_info.world_size, is_master=True, timeout=timeout, wait_for_workers=False
        )
        worker_info = GlooInitInfo(
            master_address=init_info.master_address,
            master_port=store.port,
            rank_offset=1,
            world_size=init_info.world_size,
            timeout_seconds=init_info.timeout_seconds,
        )
        with ThreadPoolExecutor(max_workers=1) as pool:
            joined = pool.submit(self.client.init_weight_transfer_engine, asdict(worker_info))
            self.group = _join(store, SENDER, init_info.world_size, timeout)
            joined.result()
        self._store = store

    def send_weights(self) -> None:
        assert self.source is not None  # trainer_init refuses None
        metas = [TensorMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self.source.metadata()]
        if not self.is_sender:
            deque(self.source, maxlen=0)  # gathering a ZeRO-3 parameter is a collective of all ranks
            return
        self.client.start_weight_update()
        update = GlooUpdateInfo(
            names=[meta.name for meta in metas],
            dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in metas],
            shapes=[list(meta.shape) for meta in metas],
        )
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            received = pool.submit(self.client.update_weights, asdict(update))
            self._send(metas)
            received.result()
        finally:
            # Not waited for: after a failed broadcast the receiver may never answer.
            pool.shutdown(wait=False)
        self.client.finish_weight_update()

    def _send(self, metas: list[TensorMeta]) -> None:
        assert self.group is not None and self.source is not None
        stream = iter(self.source)
        for bucket in in_buckets(metas):
            _broadcast(self.group, _packed(stream, [meta.name for meta in bucket]))
        # Run the source to its end: its last gather context closes there, on every rank.
        for name, _ in stream:
            raise RuntimeError(f"the source yielded {name!r} after the last announced parameter")

    def shutdown(self) -> None:
        self.group = None
        self._store = None
