"""Aggregation: exact figures, and the same loss and gradient for every layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithm_cases import Batch, batches, poison, quick
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.aggregation import (
    LOSS_AGG_MODES,
    Denominators,
    aggregate,
    step_denominators,
)
from openrlhf.algorithms.kl import kl_loss
from openrlhf.algorithms.policy_loss import (
    PolicyLossInputs,
    PolicyLossSettings,
    loss_aggregation,
    policy_loss,
)
from openrlhf.algorithms.value_loss import value_loss
from openrlhf.batching.microbatch import MicroBatch, pack
from openrlhf.batching.plan import plan_micro_batches


def reference(mode: str, losses: list[list[float]], masks: list[list[bool]], constant: float) -> float:
    kept = [[x for x, m in zip(ls, ms, strict=True) if m] for ls, ms in zip(losses, masks, strict=True)]
    kept = [k for k in kept if k]
    if not kept:
        return 0.0
    if mode == "token-mean":
        return sum(sum(k) for k in kept) / sum(len(k) for k in kept)
    if mode == "seq-mean-token-mean":
        return sum(sum(k) / len(k) for k in kept) / len(kept)
    return sum(sum(k) / constant for k in kept) / len(kept)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(batch=batches())
@quick
def test_modes_equal_reference(mode: str, batch: Batch) -> None:
    per_token = batch.normal(1)
    losses = [per_token[a:b].tolist() for a, b in batch.bounds]
    denominators = step_denominators([np.array(mask) for mask in batch.masks], constant=7.0)
    got = aggregate(poison(per_token, batch.mask), batch.mask, batch.cu_seqlens, mode, denominators)
    assert got.item() == pytest.approx(reference(mode, losses, batch.masks, 7.0), abs=1e-12)


def test_token_mean_over_uneven_micro_batches() -> None:
    """2 tokens of loss 2 and 8 tokens of loss 1: 12 / 10, however they are cut."""
    whole = step_denominators([torch.ones(2).bool(), torch.ones(8).bool()])
    first = aggregate(torch.full((2,), 2.0), torch.ones(2).bool(), torch.tensor([0, 2]), "token-mean", whole)
    second = aggregate(torch.ones(8), torch.ones(8).bool(), torch.tensor([0, 8]), "token-mean", whole)
    assert (first + second).item() == pytest.approx(1.2)
    together = torch.cat([torch.full((2,), 2.0), torch.ones(8)])
    at_once = aggregate(together, torch.ones(10).bool(), torch.tensor([0, 2, 10]), "token-mean", whole)
    assert at_once.item() == pytest.approx(1.2)


def test_masked_truncated_samples_do_not_dilute() -> None:
    masks = [torch.ones(4).bool(), torch.zeros(12).bool()]
    denominators = step_denominators(masks)
    assert (denominators.tokens, denominators.sequences) == (4, 1)
    for mode in LOSS_AGG_MODES:
        whole = Denominators(4, 1, constant=4.0)
        loss = aggregate(torch.ones(16), torch.cat(masks), torch.tensor([0, 4, 16]), mode, whole)
        assert loss.item() == 1.0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_fully_masked_step_is_zero_with_zero_gradient(mode: str) -> None:
    per_token = torch.full((3,), math.nan, requires_grad=True)
    mask = torch.zeros(3).bool()
    loss = aggregate(per_token, mask, torch.tensor([0, 3]), mode, step_denominators([mask]))
    loss.backward()
    assert loss.item() == 0.0 and per_token.grad.tolist() == [0, 0, 0]


def test_unknown_modes_are_refused() -> None:
    parts = step_denominators([torch.ones(2).bool(), np.array([True, False])])
    assert parts == Denominators(3, 2)
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'"):
        aggregate(torch.ones(1), torch.ones(1).bool(), torch.tensor([0, 1]), "mean", parts)


# --- the layout never changes the answer ---------------------------------------------------------------


def step_loss(batch: Batch, weights: torch.Tensor, packed: MicroBatch, name: str, mode: str) -> torch.Tensor:
    """Loss of one micro-batch of a toy policy and critic that share one parameter vector."""
    denominators = step_denominators([np.array(mask) for mask in batch.masks], constant=5.0)
    x = packed.columns
    logprobs = -torch.nn.functional.softplus(x["features"] * weights[0] + weights[1])
    values = x["features"] * weights[2]
    mask = x["mask"]
    inputs = PolicyLossInputs(logprobs, x["old"], x["advantages"], mask, packed.cu_seqlens)
    policy = policy_loss(name, inputs, PolicyLossSettings(dual_clip=2.0)).per_token
    divergence = kl_loss(logprobs, x["ref"], mask, "k3")
    critic, _ = value_loss(values, x["old"], x["advantages"], mask, clip=0.2)
    aggregation = loss_aggregation(name, mode)
    total = aggregate(policy, mask, packed.cu_seqlens, aggregation, denominators)
    total = total + 0.1 * aggregate(divergence, mask, packed.cu_seqlens, mode, denominators)
    return total + 0.5 * aggregate(critic, mask, packed.cu_seqlens, mode, denominators)


def run_layout(batch: Batch, name: str, mode: str, ranks: int, **limits: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.tensor([0.3, -0.2, 0.7], requires_grad=True)
    flat = {
        "features": batch.normal(1),
        "old": -batch.normal(2).abs(),
        "ref": -batch.normal(3).abs(),
        "advantages": batch.normal(4),
    }
    cut = {key: [column[a:b].float() for a, b in batch.bounds] for key, column in flat.items()}
    cut["mask"] = [torch.tensor(mask) for mask in batch.masks]
    tokens = [list(range(n)) for n in batch.lengths]
    plan = plan_micro_batches(batch.lengths, ranks, **limits)
    total = torch.zeros(())
    for micro_batches in plan:
        for indices in micro_batches:  # empty ones run their one-token stand-in
            loss = step_loss(batch, weights, pack(tokens, cut, indices), name, mode)
            loss.backward()
            total += loss.detach()
    return total, weights.grad


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", ["ppo", "gspo", "gmpo"])
@given(batch=batches(), ranks=st.integers(1, 4), size=st.integers(1, 4), budget=st.integers(9, 30))
@settings(quick, max_examples=12)
def test_any_layout_gives_the_same_loss_and_gradient(
    name: str, mode: str, batch: Batch, ranks: int, size: int, budget: int
) -> None:
    whole, gradient = run_layout(batch, name, mode, 1, micro_batch_size=len(batch.masks))
    for limits in ({"micro_batch_size": size}, {"max_tokens": budget}):
        loss, grad = run_layout(batch, name, mode, ranks, **limits)
        torch.testing.assert_close(loss, whole, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, gradient, rtol=1e-5, atol=1e-6)
