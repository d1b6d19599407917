"""The actor's parameters as a stream that vLLM's transfer engines can send."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf.batching.buckets import DEFAULT_BUCKET_BYTES
from openrlhf.workers.deepspeed_engine import TrainEngine


class TrainerSource(WeightSource):
    """Parameters of a (ZeRO-partitioned) training engine under their Hugging Face names.

    Walking it is a collective under ZeRO-3: all ranks do so in step. Tensors are full copies, at most
    :data:`DEFAULT_BUCKET_BYTES` of them at a time, so that the memory a sync takes does not grow with the model.

    Args:
        engine: the training engine.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(*meta) for meta in self._engine.parameter_meta()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._engine.gathered_parameters(DEFAULT_BUCKET_BYTES):
            yield from bucket
