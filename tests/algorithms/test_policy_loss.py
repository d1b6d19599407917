"""Policy losses and rollout correction against plain-Python references, values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from algorithm_cases import Batch, batches, poison, quick
from hypothesis import given
from torch import Tensor

from openrlhf.algorithms.aggregation import aggregate, step_denominators
from openrlhf.algorithms.correction import (
    CorrectionSettings,
    effective_sample_size,
    rollout_correction,
)
from openrlhf.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossSettings,
    loss_aggregation,
    policy_loss,
    register_policy_loss,
)

NAMES = ("ppo", "gspo", "cispo", "gmpo", "sapo")
SETTINGS = PolicyLossSettings(clip_low=0.2, clip_high=0.3, dual_clip=1.5)
NAN = math.nan


def make_inputs(batch: Batch, *, constant_advantage: bool = False) -> PolicyLossInputs:
    """Float64 inputs with NaN and huge values on every masked token; log-ratios of about 0.4."""
    mask = batch.mask
    old = -batch.normal(1).abs() - 0.5
    advantages = batch.normal(3)
    if constant_advantage:
        for start, end in batch.bounds:
            advantages[start:end] = advantages[start].clone()
    return PolicyLossInputs(
        logprobs=poison(old + batch.normal(2, 0.4), mask).requires_grad_(),
        old_logprobs=poison(old, mask),
        advantages=poison(advantages, mask),
        action_mask=mask,
        cu_seqlens=batch.cu_seqlens,
        rollout_logprobs=poison((old + batch.normal(4, 0.4)).clamp(max=-0.05), mask),
    )


# --- references: per-token value, gradient of each token's log-prob in the sum of all losses, and where it was clipped


def clipped_surrogate(r: float, a: float, s: PolicyLossSettings) -> tuple[float, float]:
    """Value and derivative with respect to the ratio."""
    bounded = min(max(r, 1 - s.clip_low), 1 + s.clip_high)
    value, slope = (-r * a, -a) if r * a <= bounded * a else (-bounded * a, 0.0)
    if s.dual_clip is not None and a < 0 and value > -s.dual_clip * a:
        value, slope = -s.dual_clip * a, 0.0
    return value, slope


def reference(name: str, batch: Batch, x: PolicyLossInputs, s: PolicyLossSettings) -> tuple[list, list, list]:
    new, old, adv = x.logprobs.tolist(), x.old_logprobs.tolist(), x.advantages.tolist()
    loss, grad, clipped = [0.0] * len(new), [0.0] * len(new), [False] * len(new)
    for (start, end), mask in zip(batch.bounds, batch.masks, strict=True):
        actions = [t for t in range(start, end) if mask[t - start]]
        if not actions:
            continue
        ratios = {t: math.exp(new[t] - old[t]) for t in actions}
        sequence_ratio = math.exp(sum(new[t] - old[t] for t in actions) / len(actions))
        chosen = {}
        for t in actions:
            r, a = ratios[t], adv[t]
            if name == "ppo":
                loss[t], slope = clipped_surrogate(r, a, s)
                grad[t], clipped[t] = slope * r, slope == 0
            elif name == "gspo":
                loss[t], slope = clipped_surrogate(sequence_ratio, a, s)
                grad[t], clipped[t] = slope * sequence_ratio, slope == 0
            elif name == "cispo":
                weight = min(max(r, 1 - s.clip_low), 1 + s.clip_high)
                loss[t], grad[t], clipped[t] = -weight * a * new[t], -weight * a, weight != r
            elif name == "sapo":
                tau = s.sapo_tau_positive if a > 0 else s.sapo_tau_negative
                gate = 1 / (1 + math.exp(-tau * (r - 1)))
                loss[t] = -4 / tau * gate * a
                grad[t] = -4 * gate * (1 - gate) * a * r
                clipped[t] = not 1 - s.clip_low <= r <= 1 + s.clip_high
            elif name == "gmpo":
                d = math.log(r)
                if a > 0:
                    chosen[t] = min(d, s.clip_high)
                else:
                    chosen[t] = max(d, -s.clip_low)
        if name == "gmpo":
            geometric = math.exp(sum(chosen.values()) / len(actions))
            for t in actions:
                loss[t] = -adv[t] * geometric
                clipped[t] = chosen[t] != math.log(ratios[t])
                grad[t] = 0.0 if clipped[t] else -sum(adv[u] for u in actions) * geometric / len(actions)
    return loss, grad, clipped


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@given(batch=batches())
@quick
def test_loss_equals_reference(name: str, dual_clip: float | None, batch: Batch) -> None:
    settings = replace(SETTINGS, dual_clip=dual_clip)
    inputs = make_inputs(batch)
    result = policy_loss(name, inputs, settings)
    result.per_token.sum().backward()
    loss, grad, clipped = reference(name, batch, inputs, settings)
    np.testing.assert_allclose(result.per_token.detach(), loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(inputs.logprobs.grad, grad, rtol=1e-9, atol=1e-12)
    assert result.metrics["ppo_clip_ratio"].tolist() == clipped


@given(batch=batches())
@quick
def test_gspo_is_the_sequence_loss_of_the_paper(batch: Batch) -> None:
    """With one advantage a sequence: ``mean_i -min(s_i A_i, clip(s_i) A_i)``, gradient by autograd."""
    inputs = make_inputs(batch, constant_advantage=True)
    denominators = step_denominators([torch.tensor(m) for m in batch.masks])
    mode = loss_aggregation("gspo", "token-mean")
    assert mode == "seq-mean-token-mean"
    got = aggregate(
        policy_loss("gspo", inputs, SETTINGS).per_token,
        inputs.action_mask,
        inputs.cu_seqlens,
        mode,
        denominators,
    )
    got.backward()

    free = inputs.logprobs.detach().clone().requires_grad_()
    want = torch.zeros((), dtype=torch.float64)
    for (start, end), mask in zip(batch.bounds, batch.masks, strict=True):
        index = torch.arange(start, end)[torch.tensor(mask)]
        if len(index) == 0:
            continue
        s = (free[index] - inputs.old_logprobs[index]).mean().exp()
        a = inputs.advantages[index[0]]
        loss = -torch.minimum(s * a, s.clamp(0.8, 1.3) * a)
        want = want + (torch.minimum(loss, -1.5 * a) if a < 0 else loss)
    want = want / max(denominators.sequences, 1)
    assert got.item() == pytest.approx(want.item(), abs=1e-12)
    if want.requires_grad:
        want.backward()
        torch.testing.assert_close(inputs.logprobs.grad, free.grad.nan_to_num(0.0))


@pytest.mark.parametrize("name", ["ppo", "gmpo", "sapo"])
def test_gradient_is_the_derivative_of_the_value(name: str) -> None:
    batch = Batch([[True, False, True, True], [True, True]], [0, 1], seed=3)
    inputs = make_inputs(batch)
    mask = batch.mask
    clean = torch.where(mask, inputs.logprobs.detach(), 0.0).requires_grad_()

    def loss(logprobs: Tensor) -> Tensor:
        return policy_loss(name, replace(inputs, logprobs=logprobs), SETTINGS).per_token

    assert torch.autograd.gradcheck(loss, (clean,), eps=1e-6, atol=1e-6)


# --- exact figures and guards ------------------------------------------------------------------------


def one_sequence(new, old, advantages, mask, rollout=None) -> PolicyLossInputs:
    return PolicyLossInputs(
        torch.tensor(new, requires_grad=True),
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(mask).bool(),
        torch.tensor([0, len(new)]),
        None if rollout is None else torch.tensor(rollout),
    )


@pytest.mark.parametrize("junk", [NAN, 1e30, -1e30, math.inf])
def test_masked_nan_changes_nothing(junk: float) -> None:
    inputs = one_sequence([-1.0, -1.2, 0.0], [-1.0, -1.2, junk], [0.5, 0.5, 0.5], [1, 1, 0])
    result = policy_loss("ppo", inputs, PolicyLossSettings())
    loss = aggregate(
        result.per_token,
        inputs.action_mask,
        inputs.cu_seqlens,
        "token-mean",
        step_denominators([inputs.action_mask]),
    )
    loss.backward()
    assert loss.item() == -0.5
    assert result.metrics["ppo_kl"].abs().sum() == 0
    assert inputs.logprobs.grad.tolist() == [-0.25, -0.25, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "advantages"])
def test_unmasked_nan_surfaces(name: str, column: str) -> None:
    inputs = one_sequence([-1.0, -1.2], [-1.0, -1.2], [0.5, 0.5], [1, 1])
    broken = replace(inputs, **{column: torch.tensor([NAN, -1.0], requires_grad=column == "logprobs")})
    assert policy_loss(name, broken, PolicyLossSettings()).per_token[0].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_infinite_logprob_surfaces(name: str) -> None:
    inputs = one_sequence([-math.inf, -1.2], [-1.0, -1.2], [0.5, 0.5], [1, 1])
    assert not policy_loss(name, inputs, PolicyLossSettings()).per_token[0].isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_huge_log_ratio_stays_finite(name: str) -> None:
    inputs = one_sequence([-1.0, -1.0, -200.0], [-200.0, -200.0, -1.0], [1.0, -1.0, 1.0], [1, 1, 1])
    loss = policy_loss(name, inputs, PolicyLossSettings()).per_token.sum()
    loss.backward()
    assert loss.isfinite() and inputs.logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_only_the_current_policy_gets_a_gradient(name: str) -> None:
    inputs = one_sequence([-1.0, -1.2], [-1.1, -1.3], [0.5, -0.5], [1, 1], rollout=[-1.2, -1.1])
    constants = (inputs.old_logprobs, inputs.advantages, inputs.rollout_logprobs)
    for column in constants:
        column.requires_grad_()
    result = policy_loss(name, inputs, PolicyLossSettings(), CorrectionSettings())
    result.per_token.sum().backward()
    assert inputs.logprobs.grad.abs().min() > 0 and all(column.grad is None for column in constants)
    assert not any(values.requires_grad for values in result.metrics.values())


def test_sapo_has_the_temperatures_of_the_paper() -> None:
    inputs = one_sequence([-1.0, -1.0], [-1.5, -1.5], [1.0, -1.0], [1, 1])
    gates = [4 / tau / (1 + math.exp(-tau * (math.exp(0.5) - 1))) for tau in (1.0, 1.05)]
    loss = policy_loss("sapo", inputs, PolicyLossSettings()).per_token.tolist()
    assert loss == pytest.approx([-gates[0], gates[1]])


def test_clip_fraction() -> None:
    inputs = one_sequence([math.log(1.5), 0.0], [0.0, 0.0], [1.0, 1.0], [1, 1])
    clipped = policy_loss("ppo", inputs, PolicyLossSettings()).metrics["ppo_clip_ratio"]
    assert clipped.mean() == 0.5


def test_half_precision_is_computed_in_float32() -> None:
    inputs = one_sequence([-1.0, -1.2], [-1.1, -1.3], [0.5, 0.5], [1, 1])
    half = replace(inputs, logprobs=inputs.logprobs.detach().bfloat16().requires_grad_())
    assert policy_loss("ppo", half, PolicyLossSettings()).per_token.dtype == torch.float32


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy loss 'x'.*known: ppo, gspo"):
        policy_loss("x", one_sequence([0.0], [0.0], [0.0], [1]), PolicyLossSettings())


def test_registered_loss_gets_clean_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))

    @register_policy_loss("test_plain")
    def plain(inputs: PolicyLossInputs, settings: PolicyLossSettings):
        assert inputs.old_logprobs.isfinite().all()
        return 0.25 - inputs.logprobs * inputs.advantages, {"seen": torch.ones(2)}

    inputs = one_sequence([-1.0, 0.0], [-1.0, NAN], [0.5, 0.5], [1, 0])
    result = policy_loss("test_plain", inputs, PolicyLossSettings())
    assert result.per_token.tolist() == [0.75, 0.0] and result.metrics["seen"].tolist() == [1.0, 0.0]


# --- rollout correction --------------------------------------------------------------------------------


def reference_correction(batch: Batch, old, rollout, s: CorrectionSettings) -> list[float]:
    weights = [1.0] * len(old)

    def statistic(t: int) -> float:
        p, q = math.exp(old[t]), math.exp(rollout[t])
        if s.gating == "tv":
            return abs(p - q)
        if s.gating == "binary_kl":
            return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return old[t] - rollout[t]

    for (start, end), mask in zip(batch.bounds, batch.masks, strict=True):
        actions = [t for t in range(start, end) if mask[t - start]]
        for t in actions:
            rho = math.exp(old[t] - rollout[t])
            value = statistic(t)
            if s.level == "seq":
                value = sum(statistic(u) for u in actions) / len(actions)
            if s.gating == "ratio":
                value = math.exp(value)
            bounded = min(max(rho, s.low), s.high) if s.gating == "ratio" else rho
            kept = s.mode == "clip" or s.low <= value <= s.high
            weights[t] = bounded if kept else 0.0
    return weights


CORRECTIONS = [
    CorrectionSettings.from_type("tis", 0.8, 1.2),
    CorrectionSettings.from_type("icepop", 0.8, 1.2),
    CorrectionSettings.from_type("seq-mask-tis", 0.8, 1.2),
    CorrectionSettings(level="token", mode="mask", gating="binary_kl", low=0, high=0.02),
    CorrectionSettings.from_type("icepop", 0, 0.1, gating="tv"),
    CorrectionSettings(level="seq", mode="mask", gating="binary_kl", low=0, high=0.02),
    CorrectionSettings(level="seq", mode="mask", gating="tv", low=0, high=0.1),
]


@pytest.mark.parametrize("settings", CORRECTIONS, ids=lambda s: f"{s.level}-{s.mode}-{s.gating}")
@given(batch=batches())
@quick
def test_correction_equals_reference(settings: CorrectionSettings, batch: Batch) -> None:
    inputs = make_inputs(batch)
    result = rollout_correction(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.action_mask, inputs.cu_seqlens, settings
    )
    want = reference_correction(batch, inputs.old_logprobs.tolist(), inputs.rollout_logprobs.tolist(), settings)
    np.testing.assert_allclose(result.weight, want, rtol=1e-9)
    mask = inputs.action_mask
    rejected = (torch.tensor(want) == 0) & mask
    assert torch.equal(result.metrics["is_filter_ratio"] == 1, rejected)
    gap = torch.where(mask, inputs.rollout_logprobs - inputs.old_logprobs, 0.0)
    torch.testing.assert_close(result.metrics["vllm_kl"], gap)
    rho = torch.where(mask, (-gap).exp(), 0.0)
    torch.testing.assert_close(result.metrics["is_ratio"], rho)
    torch.testing.assert_close(result.metrics["is_ratio_sq"], rho * rho)
    clamped = (torch.tensor(want, dtype=torch.float64) - rho).abs() > 1e-9
    assert torch.equal(result.metrics["is_clip_ratio"] == 1, clamped & mask & ~rejected)

    plain = policy_loss("ppo", inputs, SETTINGS).per_token
    weighted = policy_loss("ppo", inputs, SETTINGS, settings).per_token
    torch.testing.assert_close(weighted, torch.where(mask, plain * result.weight, 0.0))


def test_weight_comes_from_the_old_policy_and_is_constant() -> None:
    settings = CorrectionSettings(low=0.0, high=2.0)
    for current in (-0.2, -0.9, -3.0):  # later inner epochs
        inputs = one_sequence([current, 0.0], [-0.9, NAN], [1.0, 1.0], [1, 0], rollout=[-1.0, NAN])
        wide = PolicyLossSettings(clip_low=1.0, clip_high=99.0)
        loss = policy_loss("ppo", inputs, wide, settings).per_token
        loss.sum().backward()
        ratio = math.exp(current + 0.9)
        assert loss[0].item() == pytest.approx(-1.1052 * ratio, rel=1e-4)
        # d/dx of -w exp(x - old) is -w ratio: nothing flows through w
        assert inputs.logprobs.grad[0].item() == pytest.approx(-1.1052 * ratio, rel=1e-4)
    weight = rollout_correction(
        torch.tensor([-0.9, NAN]),
        torch.tensor([-1.0, 3.0]),
        torch.tensor([True, False]),
        torch.tensor([0, 2]),
        settings,
    ).weight
    assert weight.tolist() == pytest.approx([1.1052, 1.0], rel=1e-4) and not weight.requires_grad


def test_sequence_statistic_is_the_geometric_mean() -> None:
    """200 tokens of +0.01: the product would be 7.389 and out of bounds, the geometric mean is 1.010."""
    old = torch.full((200,), -1.0, dtype=torch.float64)
    settings = CorrectionSettings(level="seq", mode="mask", low=0.5, high=5.0)
    result = rollout_correction(old, old - 0.01, torch.ones(200).bool(), torch.tensor([0, 200]), settings)
    np.testing.assert_allclose(result.weight, math.exp(0.01))


def test_kept_sequence_still_clamps_each_token() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    rollout = torch.tensor([-4.0, 0.0, -1.0, -1.0])
    settings = CorrectionSettings.from_type("seq-mask-tis", 0.5, 2.0)
    result = rollout_correction(old, rollout, torch.ones(4).bool(), torch.tensor([0, 4]), settings)
    assert result.weight.tolist() == [2.0, 0.5, 1.0, 1.0]
    assert result.metrics["is_clip_ratio"].tolist() == [1, 1, 0, 0]


def test_rejected_tokens_stay_in_the_denominator() -> None:
    inputs = one_sequence([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], [1, 1], rollout=[-1.0, -9.0])
    result = policy_loss("ppo", inputs, PolicyLossSettings(), CorrectionSettings.from_type("icepop", 0.5, 2.0))
    mask = inputs.action_mask
    loss = aggregate(result.per_token, mask, inputs.cu_seqlens, "token-mean", step_denominators([mask]))
    assert loss.item() == -0.5


def test_gspo_with_correction_takes_its_ratio_against_the_rollout() -> None:
    inputs = one_sequence([-1.0, -2.0], [-1.1, -2.3], [1.0, 1.0], [1, 1], rollout=[-1.2, -2.0])
    got = policy_loss("gspo", inputs, PolicyLossSettings(), CorrectionSettings(low=0.0, high=0.9))
    want = policy_loss("gspo", replace(inputs, old_logprobs=inputs.rollout_logprobs), PolicyLossSettings())
    assert torch.equal(got.per_token, want.per_token)
    assert got.metrics["vllm_kl"].tolist() == pytest.approx([-0.1, 0.3], abs=1e-6)
    assert got.metrics["ppo_kl"].tolist() == pytest.approx([-0.1, -0.3], abs=1e-6)  # against the policy, as ever
    assert not {"is_clip_ratio", "is_filter_ratio"} & set(got.metrics)  # there is no weight to clamp or to set to 0


def test_correction_needs_the_rollout_logprobs() -> None:
    inputs = one_sequence([-1.0], [-1.0], [1.0], [1])
    with pytest.raises(ValueError, match="needs the rollout log-probs"):
        policy_loss("ppo", inputs, PolicyLossSettings(), CorrectionSettings())


def test_divergence_of_probabilities_that_round_to_0_or_1() -> None:
    """In float32 exp(-200) is 0: equal ones are kept, and 0 against 1/2 is far outside (KL 0.69 or more)."""
    old = torch.tensor([-200.0, 0.0, -200.0, math.log(0.5)])
    rollout = torch.tensor([-200.0, 0.0, math.log(0.5), -200.0])
    settings = CorrectionSettings.from_type("icepop", 0, 0.6, gating="binary_kl")
    result = rollout_correction(old, rollout, torch.ones(4).bool(), torch.tensor([0, 4]), settings)
    assert result.metrics["is_filter_ratio"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_unmasked_nan_in_the_rollout_surfaces(name: str) -> None:
    inputs = one_sequence([-1.0], [-1.0], [1.0], [1], rollout=[NAN])
    for settings in CORRECTIONS:
        result = policy_loss(name, inputs, PolicyLossSettings(), settings)
        assert result.per_token.isnan().all()


def test_effective_sample_size() -> None:
    # (1 + 1 + 1 + 5)^2 / (1 + 1 + 1 + 25) / 4
    assert effective_sample_size(8 / 4, 28 / 4) == pytest.approx(64 / 28 / 4)
    assert effective_sample_size(0.0, 0.0) == 0.0
