"""KL divergence between policy and reference: per-token estimators, the KL loss, and coefficient controllers.

With ``d = log pi(a) - log ref(a)`` for an action sampled from ``pi`` (Schulman, "Approximating KL
Divergence"):

========  =======================  ===========================================================================
name      value                    expected gradient when used as a loss (sampled from the current policy)
========  =======================  ===========================================================================
``k1``    ``d``                    0: the score function has mean 0, so k1 as a loss regularises nothing
``k2``    ``d ** 2 / 2``           that of the reverse KL, ``E[d * grad log pi]``
``k3``    ``exp(-d) - 1 + d``      that of the forward KL, ``E[(1 - ref / pi) * grad log pi]``
========  =======================  ===========================================================================

The values of k1 and k3 are unbiased estimates of the reverse KL; k2 is biased. ``unbiased_gradient`` keeps
the chosen value and replaces the gradient by the reverse KL's, weighted by ``pi / pi_old`` when the action
came from an older policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.algorithms.packed import masked_log_ratio, zero_masked

KL_ESTIMATORS = ("k1", "k2", "k3")


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Per-token KL estimate ``[N]``, at least float32, 0 on masked tokens, differentiable in ``logprobs``.

    Args:
        logprobs: log-probs of the taken tokens under the policy, ``[N]``.
        ref_logprobs: the same under the reference.
        mask: bool ``[N]``.
        estimator: ``k1``, ``k2`` or ``k3``. The log-ratio is clamped to ±20
            (:data:`openrlhf.algorithms.packed.LOG_RATIO_LIMIT`).
    """
    log_ratio = masked_log_ratio(logprobs, ref_logprobs, mask)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    if estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses near d = 0
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"unknown KL estimator {estimator!r} (--kl_estimator); known: {', '.join(KL_ESTIMATORS)}")


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
    *,
    unbiased_gradient: bool = False,
    old_logprobs: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Per-token KL term of the policy loss, ``[N]``, 0 on masked tokens.

    Args:
        logprobs: current policy, requires grad.
        ref_logprobs: reference.
        mask: bool ``[N]``.
        estimator: gives the value, and without ``unbiased_gradient`` also the gradient (see the table above).
        unbiased_gradient: use the gradient of the reverse KL, ``w * d * grad log pi``, for every estimator.
        old_logprobs: log-probs under the policy that sampled the tokens; ``w`` is the token's importance
            weight ``pi / pi_old`` (detached). Without it ``w`` is 1, which is right only on-policy.
        weight: where another policy ``mu`` sampled them, the rest of the way to it: ``pi_old / mu``, bounded in some
            way; a factor of ``w``.
    """
    value = estimate_kl(logprobs, ref_logprobs, mask, estimator)
    if not unbiased_gradient:
        return value
    current = zero_masked(logprobs, mask)
    coefficient = masked_log_ratio(current.detach(), ref_logprobs, mask)
    if old_logprobs is not None:
        coefficient = coefficient * masked_log_ratio(current.detach(), old_logprobs, mask).exp()
    if weight is not None:
        coefficient = coefficient * weight
    straight_through = current - current.detach()
    return value.detach() + coefficient * straight_through


class KLController:
    """The KL coefficient: constant, or kept near a target (Ziegler et al. 2019, arXiv:1909.08593).

    ``value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon``, where ``n_steps`` counts samples
    (sequences) over all ranks since the last update.
    """

    def __init__(self, init_coef: float, target: float | None, horizon: int) -> None:
        self.value, self.target, self.horizon = init_coef, target, horizon

    def update(self, kl: float, n_steps: int) -> None:
        """Adapt the coefficient to the observed mean KL of ``n_steps`` samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.value *= 1.0 + error * n_steps / self.horizon
