"""The actor's parameters as a stream that vLLM's transfer engines can send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf.engines.weight_sync.buckets import DEFAULT_BUCKET_BYTES


class GatheringEngine(Protocol):
    """The part of the training engine that a weight source needs."""

    def parameter_meta(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]: ...

    def gathered_parameters(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]: ...


class TrainerSource(WeightSource):
    """Parameters of a (ZeRO-partitioned) training engine under their Hugging Face names.

    Walking it is a collective under ZeRO-3: all ranks do so in step. Tensors are full copies, at most
    ``bucket_bytes`` of them at a time, so that the memory a sync takes does not grow with the model.

    Args:
        engine: the training engine.
        dtype: what floating-point weights are sent as; None sends each in its own dtype.
        bucket_bytes: how much is gathered at once.
    """

    def __init__(
        self,
        engine: GatheringEngine,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._engine = engine
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes

    def _wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self._wire_dtype(dtype), shape) for name, dtype, shape in self._engine.parameter_meta()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._engine.gathered_parameters(self._bucket_bytes):
            for name, tensor in bucket:
                yield name, tensor.to(self._wire_dtype(tensor.dtype))
