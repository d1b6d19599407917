"""KL estimators: values, the gradient each really has, and the coefficient's controller."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algorithm_cases import Batch, batches, poison, quick
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.kl import KL_ESTIMATORS, KLController, estimate_kl, kl_loss

VALUES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}
SLOPES = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@given(batch=batches())
@quick
def test_values_and_gradients(name: str, batch: Batch) -> None:
    mask = batch.mask
    logprobs = poison(batch.normal(1), mask).requires_grad_()
    reference = poison(batch.normal(2), mask)
    estimate = estimate_kl(logprobs, reference, mask, name)
    estimate.sum().backward()
    for t, used in enumerate(mask.tolist()):
        d = (logprobs[t] - reference[t]).item()
        want = (VALUES[name](d), SLOPES[name](d)) if used else (0.0, 0.0)
        assert (estimate[t].item(), logprobs.grad[t].item()) == pytest.approx(want, abs=1e-12)


def two_action_gradient(name: str, *, unbiased: bool, behaviour: list[float] | None = None) -> float:
    """Exact expectation over both actions of d(loss)/dt for the policy softmax([t, 0]) at t = 0."""
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack([t, torch.zeros_like(t)]).log_softmax(0)
    reference = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(0)
    sampled_from = logprobs.detach().exp() if behaviour is None else torch.tensor(behaviour).double()
    loss = kl_loss(
        logprobs,
        reference,
        torch.ones(2).bool(),
        name,
        unbiased_gradient=unbiased,
        old_logprobs=None if behaviour is None else sampled_from.log(),
    )
    (sampled_from * loss).sum().backward()
    return t.grad.item()


def true_reverse_kl_gradient() -> float:
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logprobs = torch.stack([t, torch.zeros_like(t)]).log_softmax(0)
    reference = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(0)
    (logprobs.exp() * (logprobs - reference)).sum().backward()
    return t.grad.item()


def test_each_estimator_has_the_documented_gradient() -> None:
    assert true_reverse_kl_gradient() == pytest.approx(-0.25)
    assert two_action_gradient("k1", unbiased=False) == pytest.approx(0.0, abs=1e-12)
    assert two_action_gradient("k2", unbiased=False) == pytest.approx(-0.25)
    assert two_action_gradient("k3", unbiased=False) == pytest.approx(-0.2311, abs=1e-4)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_unbiased_gradient_is_the_reverse_kl_on_and_off_policy(name: str) -> None:
    assert two_action_gradient(name, unbiased=True) == pytest.approx(-0.25)
    # actions sampled by an older policy: the importance weight brings the expectation back
    assert two_action_gradient(name, unbiased=True, behaviour=[0.8, 0.2]) == pytest.approx(-0.25)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_unbiased_gradient_keeps_the_value_and_ignores_masked_tokens(name: str) -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    reference = torch.tensor([-1.5, 1e30])
    loss = kl_loss(logprobs, reference, mask, name, unbiased_gradient=True, old_logprobs=torch.tensor([-1.2, math.inf]))
    assert torch.equal(loss, estimate_kl(logprobs, reference, mask, name))
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.5 * math.exp(0.2), 0.0])


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_unmasked_nan_surfaces(name: str) -> None:
    broken = torch.tensor([math.nan, -math.inf])
    estimate = estimate_kl(broken, torch.zeros(2), torch.ones(2).bool(), name)
    assert estimate.isnan().all()


def test_k3_keeps_its_digits_and_stays_finite() -> None:
    d = torch.tensor([1e-4, -100.0])
    k3 = estimate_kl(d, torch.zeros(2), torch.ones(2).bool(), "k3")
    assert k3[0].item() == pytest.approx(5e-9, rel=2e-2) and k3.isfinite().all()
    half = estimate_kl(d.bfloat16(), torch.zeros(2).bfloat16(), torch.ones(2).bool(), "k3")
    assert half.dtype == torch.float32


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), "k4")


@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    reference=st.lists(st.floats(-3, 3), min_size=6),
)
@quick
def test_k1_and_k3_are_unbiased_estimates_of_the_reverse_kl(logits: list, reference: list) -> None:
    p = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    q = torch.tensor(reference[: len(logits)], dtype=torch.float64).log_softmax(0)
    exact = (p.exp() * (p - q)).sum().item()
    for name in ("k1", "k3"):
        estimate = estimate_kl(p, q, torch.ones(len(logits)).bool(), name)
        assert (p.exp() * estimate).sum().item() == pytest.approx(exact, abs=1e-12)


def test_adaptive_controller() -> None:
    controller = KLController(0.1, target=4.0, horizon=50)
    controller.update(kl=8.0, n_steps=10)
    assert controller.value == pytest.approx(0.104)
    controller.update(kl=0.0, n_steps=50)  # the error is clipped to -0.2 too
    assert controller.value == pytest.approx(0.104 * 0.8)
    controller.update(kl=4.4, n_steps=5)
    assert controller.value == pytest.approx(0.104 * 0.8 * (1 + 0.1 * 0.1))


def test_fixed_controller() -> None:
    controller = KLController(0.1, target=None, horizon=10000)
    controller.update(kl=100.0, n_steps=1000)
    assert controller.value == 0.1


def test_reward_and_loss_side_figures() -> None:
    """A gap of 0.5 with coefficient 0.1 is a penalty of 0.05 a token, whichever side has it."""
    gap = estimate_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.5]), torch.ones(2).bool(), "k1")
    np.testing.assert_allclose(0.1 * gap, [0.05, 0.05], rtol=1e-6)
