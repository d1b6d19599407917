"""Losses of supervised fine-tuning, reward models, DPO and KTO, each per token, pair or answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf.algorithms.packed import at_least_float32, zero_masked


def cross_entropy_tokens(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood of each supervised token, ``[N]``, 0 elsewhere (SFT)."""
    return -zero_masked(at_least_float32(logprobs), mask)


def cross_entropy_sum(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum over the supervised tokens; divide by the token count of the whole optimizer step."""
    return cross_entropy_tokens(logprobs, mask).sum()


def pairwise_sigmoid_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Bradley-Terry loss ``-log sigmoid(chosen - rejected - margin)`` of each pair, ``[P]``.

    The margin, where the data has one, is Llama 2's (arXiv:2307.09288).
    """
    gap = at_least_float32(chosen) - at_least_float32(rejected)
    return -F.logsigmoid(gap if margin is None else gap - margin)


def pairwise_logexp_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``log(1 + exp(rejected - chosen))`` of each pair, ``[P]``: the sigmoid loss without margin."""
    return F.softplus(at_least_float32(rejected) - at_least_float32(chosen))


@dataclass(frozen=True)
class PreferenceLoss:
    """Per pair, ``[P]``: loss and the detached implicit rewards ``beta * (log pi - log ref)``."""

    per_pair: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    ipo: bool = False,
) -> PreferenceLoss:
    """Direct preference optimisation on summed response log-probs, all ``[P]``.

    With ``h = (chosen - rejected) - (ref_chosen - ref_rejected)``: DPO (arXiv:2305.18290) with conservative
    label smoothing ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, or IPO (arXiv:2310.12036)
    ``(h - 1 / (2 beta))^2``.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    gap = (chosen - rejected) - (ref_chosen - ref_rejected)
    if ipo:
        loss = (gap - 1 / (2 * beta)) ** 2
    else:
        loss = -(1 - label_smoothing) * F.logsigmoid(beta * gap) - label_smoothing * F.logsigmoid(-beta * gap)
    return PreferenceLoss(loss, beta * (chosen - ref_chosen).detach(), beta * (rejected - ref_rejected).detach())


@dataclass(frozen=True)
class UnpairedLoss:
    """Per answer, ``[S]``: loss and the detached implicit reward ``beta * (log pi - log ref)``."""

    per_answer: Tensor
    rewards: Tensor


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedLoss:
    """Kahneman-Tversky optimisation (arXiv:2402.01306) on summed answer log-probs, all ``[S]``.

    With ``r = log pi - log ref``: ``w_D (1 - sigmoid(beta (r - kl)))`` for good answers and
    ``w_U (1 - sigmoid(beta (kl - r)))`` for bad ones.

    Args:
        desirable: bool, True for good answers.
        kl: the reference point z0, an estimate of KL(pi || ref) that no gradient goes through; see
            :func:`kto_reference_point`.
    """
    ratio = at_least_float32(logprobs) - ref_logprobs
    sign = torch.where(desirable, 1.0, -1.0).to(ratio)
    weight = torch.where(desirable, desirable_weight, undesirable_weight).to(ratio)
    # 1 - sigmoid(x) = sigmoid(-x), without cancellation
    return UnpairedLoss(weight * torch.sigmoid(-beta * sign * (ratio - kl)), beta * ratio.detach())


def kto_reference_point(logprobs: Tensor, ref_logprobs: Tensor) -> float:
    """KTO's z0: the mean log-ratio of answers ``[S]`` to prompts that they don't belong to, at least 0."""
    return max(0.0, float((logprobs.double() - ref_logprobs.double()).mean()))
