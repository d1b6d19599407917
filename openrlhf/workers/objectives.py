"""The losses of policy and critic on one micro-batch: algorithms put together, nothing distributed.

Columns of a micro-batch (each ``[N]``): ``action_mask``, ``advantages``, ``returns``, and where they are needed
``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``, ``old_values``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.aggregation import aggregate
from openrlhf.algorithms.correction import CorrectionSettings
from openrlhf.algorithms.kl import estimate_kl, kl_loss
from openrlhf.algorithms.metrics import STEP, MetricSum
from openrlhf.algorithms.policy_loss import PolicyLossInputs, PolicyLossSettings, loss_aggregation, policy_loss
from openrlhf.algorithms.value_loss import value_loss
from openrlhf.batching.microbatch import MicroBatch
from openrlhf.config import PPOConfig
from openrlhf.workers.messages import StepBatch


class Objective(NamedTuple):
    """Contribution of one micro-batch to the loss of its optimizer step, and its metrics.

    Metrics of kind ``step`` weigh a micro-batch by its share of the step's action tokens, so that the parts of one
    step add up to a weight of 1.
    """

    loss: Tensor
    metrics: MetricSum


def correction_settings(cfg: PPOConfig) -> CorrectionSettings | None:
    """The engine-trainer correction that the flags ask for; None when it is off."""
    if not cfg.enable_vllm_is_correction:
        return None
    low, high = cfg.vllm_is_truncated_threshold
    return CorrectionSettings.from_type(cfg.vllm_is_correction_type, low, high, gating=cfg.vllm_is_correction_gating)


class PolicyObjective:
    """Policy loss, KL loss, entropy bonus and auxiliary loss as the flags put them together."""

    def __init__(self, cfg: PPOConfig) -> None:
        low, high = cfg.eps_clip_low_high or (cfg.eps_clip, cfg.eps_clip)
        self.name = cfg.policy_loss_type
        self.settings = PolicyLossSettings(clip_low=low, clip_high=high, dual_clip=cfg.dual_clip)
        self.correction = correction_settings(cfg)
        self.aggregation = loss_aggregation(cfg.policy_loss_type, cfg.loss_agg_mode)
        self.kl_estimator = cfg.kl_estimator
        self.kl_unbiased = cfg.kl_unbiased_gradient
        self.entropy_coef = cfg.entropy_loss_coef
        self.aux_coef = cfg.aux_loss_coef

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef is not None

    def __call__(
        self,
        batch: MicroBatch,
        step: StepBatch,
        logprobs: Tensor,
        entropy: Tensor | None = None,
        aux_loss: Tensor | None = None,
    ) -> Objective:
        """Evaluate on one micro-batch.

        Args:
            batch: packed sequences with their columns.
            step: the optimizer step that the micro-batch belongs to.
            logprobs: ``[N]`` under the current policy, with gradient.
            entropy: ``[N]``, needed when :attr:`needs_entropy`.
            aux_loss: scalar router loss of this micro-batch, weighted by its share of the step's tokens.
        """
        columns, mask = batch.columns, batch.columns["action_mask"]
        old = columns.get("old_logprobs")
        # One optimizer step a rollout: the policy has not moved, old and new log-probs are equal.
        old = logprobs.detach() if old is None else old
        result = policy_loss(
            self.name,
            PolicyLossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                advantages=columns["advantages"],
                action_mask=mask,
                cu_seqlens=batch.cu_seqlens,
                rollout_logprobs=columns.get("rollout_logprobs"),
            ),
            self.settings,
            self.correction,
        )

        def mean(per_token: Tensor) -> Tensor:
            return aggregate(per_token, mask, batch.cu_seqlens, self.aggregation, step.denominators)

        policy = mean(result.per_token)
        loss = policy
        metrics = MetricSum()
        share = mask.sum() / max(step.denominators.tokens, 1)
        per_token = dict(result.metrics)
        rollout = columns.get("rollout_logprobs")
        if rollout is not None:
            per_token["logprobs_diff"] = (old - rollout).abs()
        ref = columns.get("ref_logprobs")
        if ref is not None:
            per_token["kl"] = estimate_kl(logprobs.detach(), ref, mask, self.kl_estimator)
            if step.kl_coef > 0:
                penalty = kl_loss(
                    logprobs,
                    ref,
                    mask,
                    self.kl_estimator,
                    unbiased_gradient=self.kl_unbiased,
                    old_logprobs=old,
                    weight=result.weight,
                )
                loss = loss + step.kl_coef * mean(penalty)
        if entropy is not None and self.entropy_coef is not None:
            per_token["entropy_loss"] = entropy
            if self.entropy_coef != 0:
                loss = loss - self.entropy_coef * mean(entropy)
        if aux_loss is not None and self.aux_coef > 0:
            loss = loss + self.aux_coef * share * aux_loss
            metrics.add("aux_loss", share * aux_loss, share, STEP)
        metrics.add("policy_loss", policy, share, STEP)
        metrics.add_tokens(per_token, mask)
        return Objective(loss, metrics)


def value_objective(cfg: PPOConfig, batch: MicroBatch, step: StepBatch, values: Tensor) -> Objective:
    """The clipped value loss of the critic on one micro-batch; ``values`` is ``[N]``, with gradient."""
    columns, mask = batch.columns, batch.columns["action_mask"]
    per_token, token_metrics = value_loss(values, columns["old_values"], columns["returns"], mask, clip=cfg.value_clip)
    loss = aggregate(per_token, mask, batch.cu_seqlens, "token-mean", step.denominators)
    metrics = MetricSum()
    metrics.add("critic_loss", loss, mask.sum() / max(step.denominators.tokens, 1), STEP)
    metrics.add_tokens(token_metrics, mask)
    return Objective(loss, metrics)


def check_finite(batch: MicroBatch, values: Tensor, what: str) -> None:
    """Stop on a NaN or infinity at an action token, naming the sequence and position.

    Raises:
        FloatingPointError: with the places of the first few.
    """
    mask = batch.columns["action_mask"]
    broken = (~torch.isfinite(values.detach()) & mask).nonzero().flatten().tolist()
    if not broken:
        return
    starts = batch.cu_seqlens.tolist()
    places = []
    for token in broken[:5]:
        sequence = next(i for i in range(len(starts) - 1) if starts[i] <= token < starts[i + 1])
        places.append(f"sample {int(batch.sequence_index[sequence])} token {token - starts[sequence]}")
    raise FloatingPointError(
        f"{what} is not finite at {len(broken)} of {int(mask.sum())} action tokens: {', '.join(places)}. "
        "Nothing was updated; the weights are those of the last finished step. Lower the learning rate, or look "
        "at these samples: they are numbered from 0 as the lines of the rollout's dump (--dump_rollouts)."
    )
