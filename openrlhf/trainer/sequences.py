"""Micro-batches of tokenized sequences, and summed log-probs of their answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from openrlhf.algorithms.packed import masked_sequence_sum
from openrlhf.batching import MicroBatch, pack, plan_micro_batches
from openrlhf.config import DPOConfig, KTOConfig, RMConfig, SFTConfig
from openrlhf.utils.logging import get_logger
from openrlhf.workers.backoff import MemoryBackoff
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.distributed import World

logger = get_logger(__name__)

_TELL_AFTER_S = 60.0

BLOCK = 1024
"""Groups planned at a time outside of training; a plan over a whole data set would take long to make."""


class Sequences(Protocol):
    """Tokenized sequences by number."""

    lengths: np.ndarray

    def fetch(self, indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids ``[T]`` and answer mask bool ``[T]`` of some sequences."""


@dataclass(frozen=True)
class Limits:
    """What one micro-batch may hold.

    Attributes:
        groups: most groups (pairs, or single sequences).
        group_tokens: most tokens of a group.
        packing: fill each micro-batch up to as many tokens as ``groups`` of the longest groups have, whatever
            their number.
    """

    groups: int
    group_tokens: int
    packing: bool


def row_limits(cfg: SFTConfig | RMConfig | DPOConfig | KTOConfig, sequences_per_row: int) -> Limits:
    """What a micro-batch of rows may hold; ``--micro_train_batch_size`` counts rows."""
    return Limits(cfg.micro_train_batch_size, sequences_per_row * cfg.max_len, cfg.packing_samples)


def own_plan(lengths: Sequence[int], engine: TrainEngine, limits: Limits) -> list[list[int]]:
    """This rank's micro-batches of groups that have so many tokens each; as many on every rank."""
    plan = plan_micro_batches(
        lengths,
        engine.data_parallel_size,
        micro_batch_size=None if limits.packing else limits.groups,
        max_tokens=limits.groups * limits.group_tokens if limits.packing else None,
    )
    return plan[engine.data_parallel_rank]


def micro_batches(
    sequences: Sequences,
    groups: Sequence[Sequence[int]],
    engine: TrainEngine,
    limits: Limits,
    block: int | None = None,
) -> Iterator[MicroBatch]:
    """This rank's share of some groups of equally many sequences, on its device; as many micro-batches on every rank.

    Args:
        block: so many groups are planned at a time; None = all.

    Yields:
        Sequences of groups one after another, numbered through all ``groups`` (see :func:`positions`), with the
        column ``mask``.
    """
    block = block or max(1, len(groups))
    for start in range(0, len(groups), block):
        planned = groups[start : start + block]
        lengths = [int(sequences.lengths[list(group)].sum()) for group in planned]
        for members in own_plan(lengths, engine, limits):
            parts = sequences.fetch([index for i in members for index in planned[i]])
            batch = pack([ids for ids, _ in parts], {"mask": [mask for _, mask in parts]}, range(len(parts)))
            if parts:
                size = len(groups[0])
                numbers = [size * (start + i) + place for i in members for place in range(size)]
                batch = replace(batch, sequence_index=torch.tensor(numbers))
            else:
                batch = replace(batch, columns={"mask": torch.zeros(batch.num_tokens, dtype=torch.bool)})
            yield engine.place(batch)


def positions(batch: MicroBatch, group: int) -> list[int]:
    """Which groups of ``group`` sequences a micro-batch holds; none for a stand-in."""
    return [] if batch.is_dummy else [index // group for index in batch.sequence_index[::group].tolist()]


def answer_logprobs(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """float64 ``[S]``: log-prob of each sequence's answer, the sum over its mask."""
    return masked_sequence_sum(logprobs.double(), batch.columns["mask"], batch.cu_seqlens)


def all_answer_logprobs(
    backoff: MemoryBackoff, world: World, sequences: Sequences, indices: Sequence[int], limits: Limits
) -> Tensor:
    """float64 ``[len(indices)]`` on the CPU: :func:`answer_logprobs` of some sequences, the same on all ranks.

    Without gradients; the engine of ``backoff`` holds a policy. All ranks call it. When it takes long, it logs
    how far it is.
    """
    engine = backoff.engine
    sums = torch.zeros(len(indices), dtype=torch.float64)
    told = time.monotonic()
    for batch in micro_batches(sequences, [(int(index),) for index in indices], engine, limits, BLOCK):
        values = backoff.forward(batch, lambda part: answer_logprobs(part, engine(part).logprobs))
        if members := positions(batch, 1):
            sums[members] = values.cpu()
            if time.monotonic() - told > _TELL_AFTER_S:
                told = time.monotonic()
                logger.info("log-probs: %d of %d sequences", members[0] // BLOCK * BLOCK, len(indices))
    if world.size > 1:
        dist.all_reduce(sums)  # each sequence was on one rank (or several that share one), and is 0 on the others
    return sums / engine.data_copies
