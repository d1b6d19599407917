"""From per-token losses to the loss of an optimizer step, independent of how the step was cut up.

The denominators count the *whole* optimizer step: all micro-batches of all ranks. Each micro-batch
contributes ``numerator / denominator``; the sum of the contributions over micro-batches and ranks is the
full-batch loss, for any split. (Where a framework averages gradients over ``R`` ranks, the contribution is
multiplied by ``R``; where it averages over accumulation steps, by their number.) A sequence must lie in one
micro-batch, whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from openrlhf.algorithms.packed import masked_sequence_mean, zero_masked

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Denominators:
    """Counts of one whole optimizer step.

    Attributes:
        tokens: unmasked tokens.
        sequences: sequences with at least one unmasked token.
        constant: divisor of ``seq-mean-token-sum-norm`` in tokens (Dr. GRPO: the generation limit).
    """

    tokens: int
    sequences: int
    constant: float = 1.0


def step_denominators(masks: Iterable[np.ndarray | Tensor], constant: float = 1.0) -> Denominators:
    """Count an optimizer step.

    Args:
        masks: one bool mask ``[T_i]`` for each sequence of the step on all ranks, *after* every mask
            (truncated samples, tool tokens) has been applied.
        constant: see :class:`Denominators`.
    """
    counts = [int(mask.sum()) for mask in masks]
    return Denominators(sum(counts), sum(count > 0 for count in counts), constant)


def aggregate(per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """Contribution of a micro-batch to the loss of the optimizer step; a scalar.

    Modes: ``token-mean``, the mean over all tokens of the step (DAPO); ``seq-mean-token-mean``, the mean
    over sequences of each one's token mean (GRPO); ``seq-mean-token-sum-norm``, the mean over sequences of
    each one's token sum divided by a constant (Dr. GRPO). A step without unmasked tokens gives 0 and zero
    gradients.

    Args:
        per_token: loss of each token ``[N]``; values on masked tokens, NaN included, change nothing.
        mask: bool ``[N]``.
        cu_seqlens: int ``[S + 1]``.
        mode: one of :data:`LOSS_AGG_MODES`.
        denominators: of the whole optimizer step.
    """
    if mode == "token-mean":
        return zero_masked(per_token, mask).sum() / max(denominators.tokens, 1)
    sequences = max(denominators.sequences, 1)
    if mode == "seq-mean-token-mean":
        return masked_sequence_mean(per_token, mask, cu_seqlens).sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        return zero_masked(per_token, mask).sum() / (sequences * denominators.constant)
    raise ValueError(f"unknown loss aggregation {mode!r} (--loss_agg_mode); known: {', '.join(LOSS_AGG_MODES)}")
