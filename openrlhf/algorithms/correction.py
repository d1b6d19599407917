"""Correction of the policy loss for the gap between rollout engine and trainer.

The engine sampled with ``mu`` (its own numerics, or older weights); the trainer recomputes ``pi_old``. Each
token's loss is weighted by ``rho = pi_old / mu``, bounded in one of several ways. The weight is built from
the *old* log-probs, so it is constant over inner epochs, and it carries no gradient. Rejected tokens get
weight 0 and stay in the loss denominators: rejection makes a step smaller, it doesn't amplify what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.packed import masked_log_ratio, masked_sequence_mean, sequence_ids, zero_masked

CORRECTION_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
"""``--vllm_is_correction_type`` as (level, mode)."""


@dataclass(frozen=True)
class CorrectionSettings:
    """What to do with ``rho`` and within which bounds.

    Attributes:
        level: ``token``, each token is judged by itself; ``seq``, whole sequences are judged by the mean of
            the statistic over their action tokens (for ratios the *geometric* mean, not the product).
        mode: ``clip``, weight ``clamp(rho, low, high)``; ``mask``, weight 0 outside the bounds.
        gating: the statistic held against the bounds. ``ratio``: ``rho``. ``binary_kl``: KL from ``mu`` to
            ``pi_old`` of the two-way choice "this token or another". ``tv``: ``|pi_old - mu|`` of the token.
        low, high: bounds, inclusive.

    Inside a kept sequence, ratio gating still clamps each token's weight to the bounds. The divergence gates
    bound no ratio, and keep ``rho`` itself as the weight.
    """

    level: str = "token"
    mode: str = "clip"
    gating: str = "ratio"
    low: float = 0.5
    high: float = 5.0

    @classmethod
    def from_type(cls, name: str, low: float, high: float, gating: str = "ratio") -> CorrectionSettings:
        """Settings of ``tis``, ``icepop`` or ``seq-mask-tis``."""
        level, mode = CORRECTION_TYPES[name]
        return cls(level=level, mode=mode, gating=gating, low=low, high=high)


@dataclass(frozen=True)
class Correction:
    """Result.

    Attributes:
        weight: ``[N]``, detached; 1 on masked tokens.
        metrics: per-token values ``[N]``: ``vllm_kl`` (log mu minus log pi_old, an estimate of KL(mu ||
            pi_old)), ``is_ratio`` and ``is_ratio_sq`` (see :func:`effective_sample_size`),
            ``is_clip_ratio`` (1 where the weight was clamped), ``is_filter_ratio`` (1 where the token was
            rejected).
    """

    weight: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def rollout_correction(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    settings: CorrectionSettings,
) -> Correction:
    """Weights of the policy loss for the mismatch between trainer and rollout engine.

    Args:
        old_logprobs: trainer's log-probs at the start of the update, ``[N]``.
        rollout_logprobs: engine's log-probs of the same tokens, ``[N]``.
        mask: bool ``[N]``, action tokens.
        cu_seqlens: int ``[S + 1]``.
        settings: level, mode, gating and bounds.
    """
    log_rho = masked_log_ratio(old_logprobs, rollout_logprobs, mask)
    rho = log_rho.exp()
    metrics = {
        "vllm_kl": -log_rho,
        "is_ratio": zero_masked(rho, mask),
        "is_ratio_sq": zero_masked(rho**2, mask),
    }
    weight = rho
    if settings.gating == "ratio":
        weight = rho.clamp(settings.low, settings.high)
    keep = torch.ones_like(mask)
    if settings.mode == "mask":
        keep = _gate(log_rho, old_logprobs, rollout_logprobs, mask, cu_seqlens, settings)
    metrics["is_clip_ratio"] = (mask & keep & (weight != rho)).to(rho.dtype)
    metrics["is_filter_ratio"] = (mask & ~keep).to(rho.dtype)
    weight = torch.where(keep, weight, torch.zeros_like(weight))
    return Correction(torch.where(mask, weight, torch.ones_like(weight)), metrics)


def _gate(
    log_rho: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    settings: CorrectionSettings,
) -> Tensor:
    """bool ``[N]``: tokens that are kept. A NaN is kept, so that it surfaces in the loss."""
    if settings.gating == "ratio":
        statistic = log_rho
    else:
        p = zero_masked(old_logprobs.to(log_rho.dtype), mask).exp()
        q = zero_masked(rollout_logprobs.to(log_rho.dtype), mask).exp()
        statistic = (p - q).abs() if settings.gating == "tv" else _binary_kl(q, p)
    if settings.level == "seq":
        mean = masked_sequence_mean(statistic, mask, cu_seqlens)
        statistic = mean[sequence_ids(cu_seqlens, mask.numel())]
    if settings.gating == "ratio":
        statistic = statistic.exp()
    return ~((statistic < settings.low) | (statistic > settings.high))


def _binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL of Bernoulli(q) from Bernoulli(p), finite also where a probability rounds to 0 or 1."""
    tiny = torch.finfo(p.dtype).tiny
    q_rest, p_rest = 1 - q, 1 - p
    same = q * (q.clamp(min=tiny) / p.clamp(min=tiny)).log()
    rest = q_rest * (q_rest.clamp(min=tiny) / p_rest.clamp(min=tiny)).log()
    return (same + rest).clamp(min=0)


def effective_sample_size(mean_ratio: float, mean_ratio_sq: float) -> float:
    """Effective share of the tokens, in (0, 1]: ``mean(rho)^2 / mean(rho^2)`` over all tokens of the step."""
    return mean_ratio**2 / mean_ratio_sq if mean_ratio_sq > 0 else 0.0
