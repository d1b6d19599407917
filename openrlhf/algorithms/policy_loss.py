"""Policy losses: per-token loss and per-token metrics; averaging is left to ``aggregation``.

Masked tokens are replaced before any arithmetic, so NaN or huge values there change neither a value nor a
gradient. A NaN on an unmasked token surfaces in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf.algorithms.correction import CorrectionSettings, rollout_correction
from openrlhf.algorithms.packed import (
    at_least_float32,
    masked_log_ratio,
    masked_sequence_mean,
    sequence_ids,
    zero_masked,
)
from openrlhf.algorithms.registry import Registry


@dataclass(frozen=True)
class PolicyLossInputs:
    """Packed columns of one micro-batch.

    Attributes:
        logprobs: ``[N]``, current policy, requires grad.
        old_logprobs: ``[N]``, policy at the start of the update.
        advantages: ``[N]``.
        action_mask: bool ``[N]``.
        cu_seqlens: int ``[S + 1]``.
        rollout_logprobs: ``[N]`` or None, log-probs the rollout engine sampled with.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    action_mask: Tensor
    cu_seqlens: Tensor
    rollout_logprobs: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossSettings:
    """Scalars of the losses.

    Attributes:
        clip_low, clip_high: the ratio's clip range is ``[1 - clip_low, 1 + clip_high]``.
        dual_clip: bound of the ratio for negative advantages, > 1, or None.
        sapo_tau_positive, sapo_tau_negative: temperatures of SAPO's gate by sign of the advantage.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05


@dataclass(frozen=True)
class PolicyLoss:
    """Result, zero on masked tokens.

    Attributes:
        per_token: ``[N]``, to be aggregated.
        metrics: detached per-token values ``[N]``, to be averaged over unmasked tokens: ``ppo_clip_ratio`` (1
            where the clip took effect), ``ppo_kl`` (old minus new log-prob), and those of the rollout
            correction; without a weight, none about its bounds.
        weight: of the rollout correction ``[N]``, for other terms over the same tokens; None without one.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]
    weight: Tensor | None = None


LossFunction = Callable[[PolicyLossInputs, PolicyLossSettings], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class PolicyLossSpec:
    """A registered loss.

    Attributes:
        aggregation: mode that the loss prescribes, or None where ``--loss_agg_mode`` decides.
        rollout_ratio: with rollout correction on, the ratio is taken against the rollout log-probs and no
            further weight is applied.
    """

    function: LossFunction
    aggregation: str | None
    rollout_ratio: bool


POLICY_LOSSES: Registry[PolicyLossSpec] = Registry("policy loss", "--policy_loss_type")


def register_policy_loss(
    name: str, *, aggregation: str | None = None, rollout_ratio: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Make ``function(inputs, settings) -> (per_token, metrics)`` available as ``--policy_loss_type name``.

    The function gets inputs that are finite zeros on masked tokens.
    """

    def decorate(function: LossFunction) -> LossFunction:
        POLICY_LOSSES.add(name, PolicyLossSpec(function, aggregation, rollout_ratio))
        return function

    return decorate


def loss_aggregation(name: str, requested: str) -> str:
    """The aggregation mode in force for a loss: its own, or the requested one."""
    return POLICY_LOSSES.get(name).aggregation or requested


def policy_loss(
    name: str,
    inputs: PolicyLossInputs,
    settings: PolicyLossSettings,
    correction: CorrectionSettings | None = None,
) -> PolicyLoss:
    """Per-token policy loss by name, with rollout correction.

    Args:
        name: registered loss.
        inputs: packed columns.
        settings: scalars.
        correction: how to weigh tokens for the mismatch between rollout and training log-probs; None for
            not at all. The weight is built from the old log-probs and carries no gradient.

    Raises:
        ValueError: unknown name, or correction without rollout log-probs.
    """
    spec = POLICY_LOSSES.get(name)
    clean = _clean(inputs)
    corrected = None
    metrics: dict[str, Tensor] = {}
    with torch.no_grad():
        ppo_kl = -_log_ratio(clean)
    if correction is not None:
        if clean.rollout_logprobs is None:
            raise ValueError(
                "rollout correction (--enable_vllm_is_correction) needs the rollout log-probs, but the batch has none"
            )
        corrected = rollout_correction(
            clean.old_logprobs, clean.rollout_logprobs, clean.action_mask, clean.cu_seqlens, correction
        )
        metrics.update(corrected.metrics)
        if spec.rollout_ratio:
            clean = replace(clean, old_logprobs=clean.rollout_logprobs)
            del metrics["is_clip_ratio"], metrics["is_filter_ratio"]
    per_token, own_metrics = spec.function(clean, settings)
    if corrected is not None and not spec.rollout_ratio:
        per_token = per_token * corrected.weight
    metrics.update(own_metrics, ppo_kl=ppo_kl)
    mask = clean.action_mask
    return PolicyLoss(
        zero_masked(per_token, mask),
        {key: zero_masked(value.detach().float(), mask) for key, value in metrics.items()},
        None if corrected is None else corrected.weight,
    )


def _clean(inputs: PolicyLossInputs) -> PolicyLossInputs:
    mask = inputs.action_mask

    def wide(column: Tensor) -> Tensor:
        return zero_masked(at_least_float32(column), mask)

    rollout = inputs.rollout_logprobs
    return replace(
        inputs,
        logprobs=wide(inputs.logprobs),
        old_logprobs=wide(inputs.old_logprobs).detach(),
        advantages=wide(inputs.advantages).detach(),
        rollout_logprobs=None if rollout is None else wide(rollout).detach(),
    )


def _log_ratio(inputs: PolicyLossInputs) -> Tensor:
    return masked_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.action_mask)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: PolicyLossSettings) -> tuple[Tensor, Tensor]:
    """``-min(ratio * A, clip(ratio) * A)`` with the dual clip, and 1 where a clip took effect."""
    free = ratio * advantages
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    loss = -torch.minimum(free, bounded)
    clipped = bounded < free
    if settings.dual_clip is not None:
        # for negative advantages the loss can grow with the ratio without bound; c * |A| is the ceiling
        ceiling = -settings.dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    return loss, clipped.float()


@register_policy_loss("ppo")
def ppo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with separate bounds and dual clip (arXiv:1707.06347, 2503.14476, 1912.09729).

    ``-min(r A, clip(r, 1 - low, 1 + high) A)``; for ``A < 0`` at most ``c |A|``.
    """
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp()
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, settings)
    return loss, {"ppo_clip_ratio": clipped}


@register_policy_loss("gspo", aggregation="seq-mean-token-mean", rollout_ratio=True)
def gspo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Sequence-level ratio ``s = exp(mean_t log r_t)``, clipped like PPO's (GSPO-token, arXiv:2507.18071).

    Each token has the value ``s`` and the gradient ``s * grad log pi_t``; with equal advantages in a
    sequence, the mean over its tokens is GSPO's sequence loss, value and gradient.
    """
    log_ratio = _log_ratio(inputs)
    mean = masked_sequence_mean(log_ratio.detach(), inputs.action_mask, inputs.cu_seqlens)
    token_mean = mean[sequence_ids(inputs.cu_seqlens, log_ratio.numel())]
    ratio = (token_mean + inputs.logprobs - inputs.logprobs.detach()).exp()
    loss, clipped = _clipped_surrogate(ratio, inputs.advantages, settings)
    return loss, {"ppo_clip_ratio": clipped}


@register_policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE with a clipped, detached importance weight: no token loses its gradient (arXiv:2506.13585).

    ``-stop_grad(clip(r, 1 - low, 1 + high)) A log pi``.
    """
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return loss, {"ppo_clip_ratio": (weight != ratio).float()}


@register_policy_loss("gmpo", aggregation="seq-mean-token-mean")
def gmpo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Geometric mean of token ratios clipped in log space (arXiv:2507.20673).

    ``-A exp(mean_t c_t)`` with ``c_t = s min(s d_t, s clip(d_t, -low, high))``, ``d`` the log-ratio and
    ``s`` the sign of the advantage; the bounds are log-ratios here (the paper uses 0.4).
    """
    log_ratio = _log_ratio(inputs)
    sign = inputs.advantages.sign()
    bounded = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    chosen = torch.where(sign * bounded < sign * log_ratio, bounded, log_ratio)
    mean = masked_sequence_mean(chosen, inputs.action_mask, inputs.cu_seqlens)
    ratio = mean.exp()[sequence_ids(inputs.cu_seqlens, log_ratio.numel())]
    clipped = (chosen != log_ratio).float()
    return -ratio * inputs.advantages, {"ppo_clip_ratio": clipped}


@register_policy_loss("sapo")
def sapo(inputs: PolicyLossInputs, settings: PolicyLossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft gate instead of a clip: ``-(4 / tau) sigmoid(tau (r - 1)) A`` (arXiv:2511.20347).

    ``tau`` depends on the sign of the advantage. ``ppo_clip_ratio`` reports ratios outside the clip range,
    for comparison only.
    """
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp()
    negative = torch.full_like(ratio, settings.sapo_tau_negative)
    tau = torch.where(inputs.advantages > 0, settings.sapo_tau_positive, negative)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1)) * inputs.advantages
    outside = (ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)
    return loss, {"ppo_clip_ratio": outside.float()}
