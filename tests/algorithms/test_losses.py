"""Value, SFT, reward-model and DPO losses against plain-Python references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithm_cases import Batch, batches, poison, quick
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.losses import (
    cross_entropy_sum,
    cross_entropy_tokens,
    dpo_loss,
    pairwise_logexp_loss,
    pairwise_sigmoid_loss,
)
from openrlhf.algorithms.packed import masked_sequence_sum, sequence_ids
from openrlhf.algorithms.value_loss import value_loss

number = st.floats(-5, 5)
pairs = st.lists(st.tuples(number, number, number, number), min_size=1, max_size=5)


def float64(numbers: list | tuple) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# --- critic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.3])
@given(batch=batches())
@quick
def test_value_loss_equals_reference(clip: float | None, batch: Batch) -> None:
    mask = batch.mask
    values = poison(batch.normal(1), mask).requires_grad_()
    old, returns = poison(batch.normal(2), mask), poison(batch.normal(3), mask)
    loss, metrics = value_loss(values, old, returns, mask, clip)
    loss.sum().backward()
    for t, used in enumerate(mask.tolist()):
        v, o, r = values[t].item(), old[t].item(), returns[t].item()
        if not used:
            want = (0.0, 0.0, 0.0)
        else:
            bounded = v if clip is None else min(max(v, o - clip), o + clip)  # v itself inside the range
            free = (v - r) ** 2 >= (bounded - r) ** 2
            want = (
                0.5 * max((v - r) ** 2, (bounded - r) ** 2),
                # where both are equal the value is inside the range, and the slope is the same
                (v - r) if free else 0.0,
                float(clip is not None and abs(v - o) > clip),
            )
        got = (loss[t].item(), values.grad[t].item(), metrics["value_clip_ratio"][t].item())
        assert got == pytest.approx(want, abs=1e-12)


def test_value_clip_fraction_looks_at_the_unclipped_value() -> None:
    _, metrics = value_loss(torch.tensor([1.0, 0.1]), torch.zeros(2), torch.zeros(2), torch.ones(2).bool(), clip=0.2)
    assert metrics["value_clip_ratio"].mean() == 0.5


def test_only_the_current_critic_gets_a_gradient() -> None:
    values, old, returns = (torch.tensor([number], requires_grad=True) for number in (1.0, 0.9, 0.5))
    loss, metrics = value_loss(values, old, returns, torch.ones(1).bool(), clip=0.2)
    loss.sum().backward()
    assert values.grad.item() == 0.5 and old.grad is None and returns.grad is None
    assert not any(column.requires_grad for column in metrics.values())


def test_unmasked_nan_in_the_critic_surfaces() -> None:
    loss, _ = value_loss(torch.tensor([math.nan]), torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), 0.2)
    assert loss.isnan().all()


# --- supervised -----------------------------------------------------------------------------------------


@given(batch=batches())
@quick
def test_cross_entropy(batch: Batch) -> None:
    mask = batch.mask
    logprobs = poison(batch.normal(1), mask).requires_grad_()
    loss = cross_entropy_sum(logprobs, mask)
    loss.backward()
    want = -sum(x for x, m in zip(batch.normal(1).tolist(), mask.tolist(), strict=True) if m)
    assert loss.item() == pytest.approx(want, abs=1e-12)
    assert torch.equal(logprobs.grad, -mask.double())
    assert torch.equal(cross_entropy_tokens(logprobs, mask).sum(), loss)
    assert cross_entropy_sum(logprobs.bfloat16(), mask).dtype == torch.float32


def test_response_logprobs_leave_out_both_prompts() -> None:
    """Prompt 2, chosen 3, rejected 4 tokens, every log-prob -1: sums -3 and -4."""
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    sums = masked_sequence_sum(torch.full((11,), -1.0), mask, torch.tensor([0, 5, 11]))
    assert sums.tolist() == [-3, -4]


def test_wrong_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match="describes 3 tokens, but the columns have 4"):
        sequence_ids(torch.tensor([0, 3]), 4)


# --- preferences ----------------------------------------------------------------------------------------


@given(rows=pairs)
@quick
def test_pairwise_losses_equal_reference(rows: list) -> None:
    chosen, rejected, margin, _ = (float64(column) for column in zip(*rows, strict=True))
    sigmoid = pairwise_sigmoid_loss(chosen, rejected, margin)
    plain = pairwise_logexp_loss(chosen, rejected)
    for i, (c, r, m, _) in enumerate(rows):
        assert sigmoid[i].item() == pytest.approx(math.log(1 + math.exp(-(c - r - m))), abs=1e-10)
        assert plain[i].item() == pytest.approx(math.log(1 + math.exp(r - c)), abs=1e-10)
    torch.testing.assert_close(pairwise_sigmoid_loss(chosen, rejected), plain)
    assert torch.autograd.gradcheck(pairwise_sigmoid_loss, (chosen.requires_grad_(), rejected, margin))


def test_pairwise_losses_stay_finite_in_half_precision() -> None:
    low, high = torch.tensor([-300.0]).bfloat16(), torch.tensor([300.0]).bfloat16()
    for loss in (pairwise_sigmoid_loss(low, high), pairwise_logexp_loss(low, high)):
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(600, rel=1e-2)


@given(rows=pairs, beta=st.floats(0.05, 2), smoothing=st.floats(0, 0.4))
@quick
def test_dpo_equals_reference(rows: list, beta: float, smoothing: float) -> None:
    columns = [float64(column) for column in zip(*rows, strict=True)]
    dpo = dpo_loss(*columns, beta=beta, label_smoothing=smoothing)
    ipo = dpo_loss(*columns, beta=beta, ipo=True)
    for i, (c, r, ref_c, ref_r) in enumerate(rows):
        h = (c - ref_c) - (r - ref_r)
        good, bad = math.log(1 + math.exp(-beta * h)), math.log(1 + math.exp(beta * h))
        assert dpo.per_pair[i].item() == pytest.approx((1 - smoothing) * good + smoothing * bad, abs=1e-9)
        assert ipo.per_pair[i].item() == pytest.approx((h - 1 / (2 * beta)) ** 2, rel=1e-9)
        assert dpo.chosen_rewards[i].item() == pytest.approx(beta * (c - ref_c), abs=1e-12)
        assert dpo.rejected_rewards[i].item() == pytest.approx(beta * (r - ref_r), abs=1e-12)
    trained = [column.clone().requires_grad_() for column in columns[:2]]
    shown = dpo_loss(*trained, *columns[2:], beta=beta)
    assert not shown.chosen_rewards.requires_grad and not shown.rejected_rewards.requires_grad
    columns[0].requires_grad_()
    for options in ({"label_smoothing": smoothing}, {"ipo": True}):
        assert torch.autograd.gradcheck(
            lambda c, options=options: dpo_loss(c, *columns[1:], beta=beta, **options).per_pair,
            (columns[0],),
            atol=1e-4,
        )


def test_dpo_of_an_identical_pair_is_ln_2() -> None:
    same = torch.tensor([-3.0])
    assert dpo_loss(same, same, same, same, beta=0.1).per_pair.item() == pytest.approx(math.log(2))


def test_dpo_in_half_precision_is_computed_in_float32() -> None:
    half = torch.tensor([-3.0], dtype=torch.bfloat16)
    np.testing.assert_allclose(dpo_loss(half, half, half, half, beta=0.1).per_pair, math.log(2), rtol=1e-6)
