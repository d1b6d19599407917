"""The losses of policy and critic as the flags put them together, on one packed micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openrlhf.algorithms.aggregation import Denominators
from openrlhf.algorithms.policy_loss import POLICY_LOSSES
from openrlhf.batching.microbatch import MicroBatch, pack
from openrlhf.config import PPOConfig
from openrlhf.trainer.experience import POLICY_COLUMNS, VALUE_COLUMNS
from openrlhf.workers.messages import StepBatch
from openrlhf.workers.objectives import Objective, PolicyObjective, check_finite, correction_settings, value_objective

LENGTHS = (4, 3)
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)


def batch(**columns: Tensor) -> MicroBatch:
    whole = {"action_mask": MASK, "advantages": torch.tensor([9.0, 1.0, -1.0, 2.0, 9.0, 9.0, 0.5]), **columns}
    sequences = [torch.arange(3, 3 + n) for n in LENGTHS]
    return pack(sequences, {name: column.split(LENGTHS) for name, column in whole.items()}, [0, 1])


def step(micro: MicroBatch, kl_coef: float = 0.0, tokens: int = 8) -> StepBatch:
    return StepBatch((micro,), Denominators(tokens, 2, 16.0), kl_coef)


def logprobs(seed: int = 0) -> Tensor:
    return (-torch.rand(7, generator=torch.Generator().manual_seed(seed)) - 0.5).requires_grad_()


def test_without_old_log_probs_the_loss_is_the_policy_gradient() -> None:
    micro, values = batch(), logprobs()
    result = PolicyObjective(PPOConfig())(micro, step(micro), values)
    advantages = micro.columns["advantages"]
    assert result.loss.item() == pytest.approx(-float(advantages[MASK].sum()) / 8)
    (gradient,) = torch.autograd.grad(result.loss, values)
    assert torch.allclose(gradient, torch.where(MASK, -advantages / 8, 0.0))
    assert result.metrics.values()["ppo_clip_ratio"] == 0.0
    assert "kl" not in result.metrics.values()  # no reference model: not measured, and no NaN
    # The parts of a step add up to a weight of one: this batch has 4 of its 8 action tokens.
    assert float(result.metrics["policy_loss"].weight) == 0.5


def test_clipping_uses_old_log_probs_and_both_bounds() -> None:
    values = torch.full((7,), -1.0, requires_grad=True)
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.1, 1.0, 1.0, 0.9])
    micro = batch(old_logprobs=-1.0 - ratio.log())
    objective = PolicyObjective(replace(PPOConfig(), eps_clip_low_high=(0.1, 0.3)))
    result = objective(micro, step(micro), values)
    expected = -(1.3 * 1.0 + 0.9 * -1.0 + 1.1 * 2.0 + 0.9 * 0.5) / 8
    assert result.loss.item() == pytest.approx(expected)
    assert result.metrics.values()["ppo_clip_ratio"] == 0.5


def test_kl_and_entropy_terms_are_added_with_their_coefficients() -> None:
    values = torch.full((7,), -1.0, requires_grad=True)
    micro = batch(ref_logprobs=torch.full((7,), -1.5))
    entropy = torch.full((7,), 0.7)
    cfg = replace(PPOConfig(), kl_estimator="k2", entropy_loss_coef=0.1)
    plain = PolicyObjective(PPOConfig())(micro, step(micro), values).loss.item()
    result = PolicyObjective(cfg)(micro, step(micro, kl_coef=0.2), values, entropy)
    assert result.loss.item() == pytest.approx(plain + 0.2 * (0.5 * 0.25 * 4) / 8 - 0.1 * 0.7 * 4 / 8)
    figures = result.metrics.values()
    assert figures["kl"] == pytest.approx(0.125)
    assert figures["entropy_loss"] == pytest.approx(0.7)
    # A coefficient of 0 logs the entropy and leaves the loss alone.
    logged = PolicyObjective(replace(cfg, entropy_loss_coef=0.0))(micro, step(micro), values, entropy)
    assert logged.loss.item() == pytest.approx(plain)
    assert "entropy_loss" in logged.metrics.values()


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize(
    ("sampled_with", "correction"), [([0.5, 0.5], False), ([0.8, 0.2], True), ([0.45, 0.55], True)]
)
def test_unbiased_gradient_of_the_kl_for_tokens_of_any_policy(
    loss: str, has_old: bool, sampled_with: list[float], correction: bool
) -> None:
    """Over both actions, as often as they are sampled, it is that of KL(p || q): sum of (log p - log q) dp."""
    reference = torch.tensor([1.0, 0.0]).log_softmax(0)
    cfg = replace(
        PPOConfig(),
        use_kl_loss=True,
        kl_unbiased_gradient=True,
        policy_loss_type=loss,
        enable_vllm_is_correction=correction,
        vllm_is_truncated_threshold=(0.1, 10.0),
    )
    gradient = 0.0
    for action, share in enumerate(sampled_with):
        logit = torch.zeros((), requires_grad=True)
        policy = torch.stack([logit, torch.zeros(())]).log_softmax(0)[action]
        columns = {
            "action_mask": torch.tensor([True]),
            "advantages": torch.zeros(1),
            "ref_logprobs": reference[action : action + 1],
            "rollout_logprobs": torch.tensor([share]).log(),
        }
        if has_old:
            columns["old_logprobs"] = torch.tensor([0.5]).log()
        micro = pack([torch.tensor([5])], {name: [column] for name, column in columns.items()}, [0])
        PolicyObjective(cfg)(micro, StepBatch((micro,), Denominators(1, 1, 1.0), 1.0), policy[None]).loss.backward()
        assert logit.grad is not None
        gradient += share * float(logit.grad)
    assert gradient == pytest.approx(-0.25)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_loss_is_of_the_policy_to_the_reference(estimator: str, unbiased: bool) -> None:
    values, ref, old = logprobs(0), logprobs(1).detach(), logprobs(2).detach()
    micro = batch(ref_logprobs=ref, old_logprobs=old)
    cfg = replace(PPOConfig(), kl_estimator=estimator, kl_unbiased_gradient=unbiased)
    with_kl, without = (PolicyObjective(cfg)(micro, step(micro, kl_coef=coef), values) for coef in (0.2, 0.0))
    gap = (values - ref).detach()
    kl = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[estimator]
    slope = {"k1": torch.ones(7), "k2": gap, "k3": 1 - (-gap).exp()}[estimator]
    if unbiased:  # the reverse KL's, by the importance of each token
        slope = gap * (values - old).detach().exp()
    assert (with_kl.loss - without.loss).item() == pytest.approx(0.2 * float(kl[MASK].sum()) / 8, abs=1e-7)
    one, other = (torch.autograd.grad(result.loss, values)[0] for result in (with_kl, without))
    torch.testing.assert_close(one - other, torch.where(MASK, 0.2 * slope / 8, 0.0), atol=1e-6, rtol=0)
    for result in (with_kl, without):
        assert result.metrics.values()["kl"] == pytest.approx(float(kl[MASK].mean()), abs=1e-6)


def test_the_gap_between_trainer_and_engine_is_shown_without_a_correction_too() -> None:
    micro, values = (
        batch(old_logprobs=torch.full((7,), -1.0), rollout_logprobs=torch.linspace(-1.6, -1.0, 7)),
        logprobs(),
    )
    figures = PolicyObjective(PPOConfig())(micro, step(micro), values).metrics.values()
    assert figures["logprobs_diff"] == pytest.approx((0.5 + 0.4 + 0.3 + 0.0) / 4, abs=1e-6)
    assert "vllm_kl" not in figures


def test_router_loss_is_weighted_by_the_share_of_tokens() -> None:
    micro, values = batch(), logprobs()
    plain = PolicyObjective(PPOConfig())(micro, step(micro), values).loss.item()
    result = PolicyObjective(replace(PPOConfig(), aux_loss_coef=0.01))(
        micro, step(micro), values, aux_loss=torch.tensor(3.0)
    )
    assert result.loss.item() == pytest.approx(plain + 0.01 * 0.5 * 3.0)
    assert result.metrics.values()["aux_loss"] == pytest.approx(3.0)


POISONS = pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])


def poisoned(name: str, filler: float) -> Tensor:
    """A column with plausible numbers at action tokens, and ``filler`` elsewhere."""
    start, end = (0.5, 1.5) if name in ("advantages", "returns") else (-1.2, -0.8)
    return torch.where(MASK, torch.linspace(start, end, 7), filler)


def assert_same(clean: Objective, dirty: Objective, one: Tensor, other: Tensor) -> None:
    assert torch.equal(clean.loss, dirty.loss) and clean.loss.isfinite()
    assert clean.metrics.values() == dirty.metrics.values()
    assert torch.equal(torch.autograd.grad(clean.loss, one)[0], torch.autograd.grad(dirty.loss, other)[0])


@POISONS
@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
@pytest.mark.parametrize("column", ["advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy"])
def test_masked_positions_change_neither_value_nor_gradient(poison: float, loss: str, column: str) -> None:
    flags = {"kl_estimator": "k3", "policy_loss_type": loss, "entropy_loss_coef": 0.1}
    cfg = replace(PPOConfig(), enable_vllm_is_correction=True, **flags)

    def run(filler: float) -> tuple[Objective, Tensor]:
        columns = {name: poisoned(name, filler if name == column else -1.0) for name in POLICY_COLUMNS}
        micro, values = batch(**columns), logprobs()
        entropy = poisoned("entropy", filler if column == "entropy" else -1.0)
        return PolicyObjective(cfg)(micro, step(micro, kl_coef=0.1), values, entropy), values

    (clean, one), (dirty, other) = run(-1.0), run(poison)
    assert_same(clean, dirty, one, other)


@POISONS
@pytest.mark.parametrize("column", VALUE_COLUMNS)
def test_masked_positions_do_not_reach_the_critic(poison: float, column: str) -> None:
    def run(filler: float) -> tuple[Objective, Tensor]:
        columns = {name: poisoned(name, filler if name == column else -1.0) for name in VALUE_COLUMNS}
        micro, values = batch(**columns), logprobs()
        return value_objective(PPOConfig(), micro, step(micro), values), values

    (clean, one), (dirty, other) = run(-1.0), run(poison)
    assert_same(clean, dirty, one, other)


def test_correction_flags_reach_the_loss() -> None:
    assert correction_settings(PPOConfig()) is None
    cfg = replace(PPOConfig(), enable_vllm_is_correction=True, vllm_is_truncated_threshold=(0.5, 2.0))
    settings = correction_settings(cfg)
    assert settings is not None and (settings.level, settings.mode, settings.low, settings.high) == (
        "token",
        "clip",
        0.5,
        2.0,
    )
    gated = replace(cfg, vllm_is_correction_type="seq-mask-tis", vllm_is_correction_gating="tv")
    settings = correction_settings(gated)
    assert settings is not None and (settings.level, settings.mode, settings.gating) == ("seq", "mask", "tv")
    values = torch.full((7,), -1.0, requires_grad=True)
    micro = batch(rollout_logprobs=torch.full((7,), -3.0))
    result = PolicyObjective(cfg)(micro, step(micro), values)
    assert result.loss.item() == pytest.approx(2.0 * -2.5 / 8)  # every weight is cut to 2
    assert result.metrics.values()["is_clip_ratio"] == 1.0


def test_value_loss_and_its_clip_fraction() -> None:
    micro = batch(old_values=torch.zeros(7), returns=torch.ones(7))
    values = torch.tensor([5.0, 1.0, 0.1, 0.0, 5.0, 5.0, 0.0], requires_grad=True)
    result = value_objective(replace(PPOConfig(), value_clip=0.2), micro, step(micro), values)
    # max of the plain and the clipped error: 0.8, 0.9, 1, 1 squared
    assert result.loss.item() == pytest.approx(0.5 * (0.64 + 0.81 + 1 + 1) / 8)
    assert result.metrics.values()["value_clip_ratio"] == 0.25
    # This batch has 4 of the 8 action tokens of its step, and so half of the step's loss.
    assert float(result.metrics["critic_loss"].weight) == 0.5
    assert result.metrics.values()["critic_loss"] == pytest.approx(2 * result.loss.item())


def test_an_infinite_output_is_named_by_sample_and_token() -> None:
    micro = batch()
    values = logprobs().detach().clone()
    values[0] = float("nan")  # not an action: no business of ours
    check_finite(micro, values, "the policy's log-probability")
    values[6] = float("-inf")
    with pytest.raises(FloatingPointError, match=r"log-probability is not finite at 1 of 4 .* sample 1 token 2"):
        check_finite(micro, values, "the policy's log-probability")
    first = pack([torch.arange(2)] * 2, {"action_mask": [torch.ones(2).bool()] * 2}, [1, 0])
    with pytest.raises(
        FloatingPointError, match=r"value is not finite at 2 of 4 .* sample 1 token 0, sample 0 token 0"
    ):
        check_finite(first, torch.tensor([float("nan"), 0.0, float("nan"), 0.0]), "the value")
