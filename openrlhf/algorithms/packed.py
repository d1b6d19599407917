"""Operations on packed per-token tensors: sums over sequences, and arithmetic that ignores masked tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to plus or minus this before ``exp`` (a ratio of 5e8), so that one token can't
overflow float32. Outside the limit the gradient is 0."""


def sequence_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """int64 ``[N]``, the sequence that each packed token belongs to.

    Raises:
        ValueError: ``cu_seqlens`` doesn't describe ``num_tokens`` tokens.
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    ids = torch.repeat_interleave(torch.arange(lengths.numel(), device=cu_seqlens.device), lengths)
    if ids.numel() != num_tokens:
        raise ValueError(f"cu_seqlens describes {ids.numel()} tokens, but the columns have {num_tokens}")
    return ids


def sequence_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of ``values[N]`` over each sequence, ``[S]``; an empty sequence gives 0."""
    ids = sequence_ids(cu_seqlens, values.numel())
    return values.new_zeros(cu_seqlens.numel() - 1).index_add(0, ids, values)


def masked_sequence_sum(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum over the unmasked tokens of each sequence, ``[S]`` (sequence log-probs, for instance)."""
    return sequence_sum(zero_masked(values, mask), cu_seqlens)


def masked_sequence_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean over the unmasked tokens of each sequence, ``[S]``; 0 where there are none."""
    counts = sequence_sum(mask.to(values.dtype), cu_seqlens)
    return masked_sequence_sum(values, mask, cu_seqlens) / counts.clamp(min=1)


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision values as float32; float32 and float64 unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """``values``, but exactly 0 where ``mask`` is False: NaN there reaches neither value nor gradient."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``numerator - denominator`` in float32 (float64 stays), clamped, and 0 on masked tokens.

    A NaN or an infinite log-prob on an *un*masked token gives NaN: the clamp must not hide a broken model.
    """
    difference = zero_masked(at_least_float32(numerator), mask)
    difference = difference - zero_masked(at_least_float32(denominator), mask)
    clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.where(difference.isfinite(), clamped, torch.full_like(clamped, math.nan))
