"""The actor's parameters as a stream that vLLM's transfer engines can send."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf import platform
from openrlhf.batching.buckets import DEFAULT_BUCKET_BYTES
from openrlhf.workers.deepspeed_engine import TrainEngine


class TrainerSource(WeightSource):
    """Parameters of a (ZeRO-partitioned) training engine under their Hugging Face names.

    Walking it is a collective under ZeRO-3: all ranks do so in step. Tensors are full copies, at most
    :data:`DEFAULT_BUCKET_BYTES` of them at a time, so that the memory a sync takes does not grow with the model.

    Transports take the tensors on streams of their own, those of one bucket on several, so a bucket is made on the
    default stream and complete before the first of it is given away.

    Args:
        engine: the training engine.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(*meta) for meta in self._engine.parameter_meta()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        buckets = self._engine.gathered_parameters(DEFAULT_BUCKET_BYTES)
        while True:
            with platform.on_default_stream():
                bucket = next(buckets, None)
            if bucket is None:
                return
            # It is empty, and no name here holds a weight, when the next one is gathered.
            while bucket:
                platform.used_on_current_stream(bucket[0][1])
                yield bucket.pop(0)
