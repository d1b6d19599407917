"""Sequence parallelism: each rank of a group runs the model on its slice of every packed row.

The ranks of a group get the same micro-batch. All layers but attention work on single tokens, so each rank computes
them for its slice. Around attention, DeepSpeed's Ulysses (https://arxiv.org/abs/2309.14509) exchanges slices of all
heads for all tokens of a slice of the heads. What the model says about tokens, a number each, is brought together on
every rank, where losses are computed as if it had been alone. Each rank's gradient is the part that went through its
slice: the sum over ranks, which the engine takes anyway, is the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.config.heads import describe_heads, fitting_sizes, heads_of
from openrlhf.models.attention import PACKED_ATTENTION, PackingError
from openrlhf.models.vision import is_vision_model

# Rotary embeddings that depend on the longest position of the row, of which a rank sees only its slice.
_ROW_WIDE_ROTARY = {"dynamic", "longrope"}


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that divide packed rows among them; by default this one alone, which keeps them whole.

    Attributes:
        rank: place in the group.
        size: number of ranks.
        exchange: Ulysses attention over the group; None for one rank.
    """

    rank: int = 0
    size: int = 1
    exchange: nn.Module | None = field(default=None, repr=False)

    def span(self, tokens: int) -> tuple[int, int]:
        """Start and width of this rank's slice of a row; slices are equally wide, the last may reach beyond the end."""
        width = -(-tokens // self.size)
        return self.rank * width, width

    def own(self, column: Tensor) -> Tensor:
        """This rank's slice ``[width]`` of a column ``[N]``; zeros beyond the end."""
        first, width = self.span(column.numel())
        return F.pad(column, (0, width * self.size - column.numel()))[first : first + width]

    def filled_bounds(self, cu_seqlens: Tensor, tokens: int) -> Tensor:
        """``cu_seqlens`` of the slices together: what fills the last one is a sequence of its own."""
        total = self.span(tokens)[1] * self.size
        return cu_seqlens if total == tokens else F.pad(cu_seqlens, (0, 1), value=total)

    def gather(self, part: Tensor, tokens: int) -> Tensor:
        """``[N, ...]`` from the slices ``[width, ...]`` of all ranks; this rank's is the one with a gradient."""
        if self.exchange is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.detach().contiguous(), group=self.exchange.spg)
        parts[self.rank] = part
        return torch.cat(parts)[:tokens]

    def attention(self, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run ``attend`` on all tokens of this rank's heads.

        Args:
            attend: ``[1, N, heads, D]`` each of queries, keys and values to ``[1, N, query heads, D]``.
            query: ``[1, width, Hq, D]``, this rank's tokens; ``key`` and ``value`` likewise.

        Returns:
            ``[1, width, Hq, D]``.
        """
        if self.exchange is None:
            return attend(query, key, value)
        copies = self.size // key.shape[2]  # fewer key heads than ranks: several ranks get the same one
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        return self.exchange(query, key, value, 0, attend=attend)


ALONE = SequenceRanks()


def _attend(query: Tensor, key: Tensor, value: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    return attend(query, key, value)


@functools.cache
def _subgroup(world: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` neighbours; made once for each default group."""
    return dist.new_subgroups(size)[0]


def sequence_ranks(size: int, config: PretrainedConfig) -> SequenceRanks:
    """Form groups of ``size`` neighbouring ranks; all ranks of the default process group call it.

    Raises:
        PackingError: this model, or its attention, can't be divided among so many ranks.
    """
    if size == 1:
        return ALONE
    _check_model(config, size)
    if dist.get_world_size() % size:
        raise PackingError(f"{dist.get_world_size()} ranks don't divide into groups of --ring_attn_size {size}")
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed(verbose=False, dist_init_required=False)
    group = _subgroup(dist.group.WORLD, size)
    return SequenceRanks(dist.get_rank(group), size, DistributedAttention(_attend, group, scatter_idx=2, gather_idx=1))


def _check_model(config: PretrainedConfig, size: int) -> None:
    text = config.get_text_config()
    heads = heads_of(text)
    if size not in fitting_sizes(*heads, shared=True):
        raise PackingError(
            f"--ring_attn_size {size}: the model ({config.model_type}) {describe_heads(*heads, size)}; "
            f"use one of {', '.join(map(str, fitting_sizes(*heads, shared=True)))}"
        )
    if config._attn_implementation != PACKED_ATTENTION:
        raise PackingError(
            f"--ring_attn_size {size} works with --packing_samples and --attn_implementation auto, but the model runs "
            f"{config._attn_implementation}"
        )
    if is_vision_model(config):
        raise PackingError(
            f"--ring_attn_size {size}: the images of {config.model_type} can't be shared by ranks; use 1"
        )
    rotary: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rotary, *rotary.values()) if isinstance(part, dict)}
    if kinds & _ROW_WIDE_ROTARY:
        raise PackingError(
            f"--ring_attn_size {size}: the rotary embedding of the model ({config.model_type}, "
            f"{', '.join(sorted(kinds & _ROW_WIDE_ROTARY))}) depends on the length of the whole row; use 1"
        )
