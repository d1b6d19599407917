"""Estimators against plain-Python float64 references written from the papers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from algorithm_cases import Batch, batches, poison, quick
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms import advantages
from openrlhf.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageSettings,
    RolloutColumns,
    compute_advantages,
    gae,
    group_statistics,
    place_token_rewards,
    register_advantage_estimator,
    whiten,
)

GROUP_ESTIMATORS = ("reinforce_baseline", "group_norm", "dr_grpo", "rloo", "opo", "pass_at_k")
ALL = ("gae", "reinforce", "flash_reinforce", "remax", *GROUP_ESTIMATORS)


def columns(
    masks: list[list[int]],
    rewards: list[float],
    groups: list[int] | None = None,
    *,
    kl: list[float] | None = None,
    values: list[float] | None = None,
    step_rewards: list[float] | None = None,
    baselines: list[float] | None = None,
) -> RolloutColumns:
    def floats(numbers: list[float] | None) -> torch.Tensor | None:
        return None if numbers is None else torch.tensor(numbers, dtype=torch.float32)

    return RolloutColumns(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(groups if groups is not None else list(range(len(masks)))),
        action_mask=torch.tensor([bool(m) for mask in masks for m in mask]),
        cu_seqlens=torch.tensor([0, *np.cumsum([len(mask) for mask in masks])], dtype=torch.int32),
        kl=floats(kl),
        values=floats(values),
        step_rewards=floats(step_rewards),
        baselines=floats(baselines),
    )


# --- the reference ---------------------------------------------------------------------------------


def best_of_subsets(rewards, mine, k):
    """The mean, over every subset of k samples that holds `mine`, of its best reward, normalised over all subsets."""
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[j] for j in subset) for subset in subsets]
    if len(set(best)) < 2:
        return 0.0
    mean = sum(best) / len(best)
    std = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best))
    own = [(b - mean) / (std + 1e-9) for b, subset in zip(best, subsets, strict=True) if mine in subset]
    return sum(own) / len(own)


def reference_outcomes(name, rewards, lengths, groups, clip, baselines, k):
    """Baseline-adjusted and clipped reward, sample by sample."""
    outcomes = []
    for i, r in enumerate(rewards):
        everyone = range(len(rewards))
        peers = [j for j in everyone if name == "flash_reinforce" or groups[j] == groups[i]]
        mine = [rewards[j] for j in peers]
        mean = sum(mine) / len(mine)
        baseline, scale = 0.0, 1.0
        if name not in ("gae", "reinforce", "remax") and max(mine) == min(mine):
            outcomes.append(0.0)
            continue
        if name in ("reinforce_baseline", "dr_grpo", "group_norm", "flash_reinforce"):
            baseline = mean
        if name == "group_norm":
            std = math.sqrt(sum((x - mean) ** 2 for x in mine) / (len(mine) - 1))
            scale = 1 / (std + 1e-9)
        if name == "rloo":
            baseline = sum(rewards[j] for j in peers if j != i) / (len(peers) - 1)
        if name == "opo":
            weight = sum(lengths[j] for j in peers)
            baseline = sum(lengths[j] * rewards[j] for j in peers) / weight if weight else 0.0
        if name == "remax":
            baseline = baselines[i]
        outcome = (r - baseline) * scale
        if name == "pass_at_k":
            outcome = best_of_subsets(mine, peers.index(i), k)
        outcomes.append(min(max(outcome, clip[0]), clip[1]))
    return outcomes


def reference(name, batch: Batch, rewards, steps, kl, values, settings: AdvantageSettings, baselines):
    """Advantages, returns and rewards of tokens, packed, as plain lists."""
    lengths = [sum(mask) for mask in batch.masks]
    clip = settings.reward_clip_range or (-math.inf, math.inf)
    outcomes = reference_outcomes(name, rewards, lengths, batch.groups, clip, baselines, settings.pass_k)
    advantages, returns, earned = [], [], []
    for i, (start, _) in enumerate(batch.bounds):
        mask = batch.masks[i]
        actions = [t for t, m in enumerate(mask) if m]
        token_reward = dict.fromkeys(actions, 0.0)
        if actions:
            token_reward[actions[-1]] += outcomes[i]
            for position, step in enumerate(steps[i] if name in ("gae", "reinforce") else []):
                earlier = [a for a in actions if a <= position]
                token_reward[earlier[-1] if earlier else actions[0]] += step
                token_reward[actions[-1]] -= step
            for a in actions:
                token_reward[a] -= settings.kl_coef * kl[start + a]
        adv, ret = [0.0] * len(mask), [0.0] * len(mask)
        following_adv = following_value = following_ret = 0.0
        for a in reversed(actions):
            if name == "gae":
                value = values[start + a]
                delta = token_reward[a] + settings.gamma * following_value - value
                following_adv = delta + settings.gamma * settings.lambd * following_adv
                following_value = value
                adv[a], ret[a] = following_adv, following_adv + value
            else:
                following_ret = token_reward[a] + settings.gamma * following_ret
                adv[a] = ret[a] = following_ret
        advantages += adv
        returns += ret
        earned += [token_reward.get(t, 0.0) for t in range(len(mask))]
    if name in ("gae", "reinforce", "reinforce_baseline"):
        flat = [m for mask in batch.masks for m in mask]
        chosen = [x for x, m in zip(advantages, flat, strict=True) if m]
        if chosen:
            mean = sum(chosen) / len(chosen)
            std = math.sqrt(sum((x - mean) ** 2 for x in chosen) / len(chosen))
            divisor = std + 1e-8 if settings.std_norm else 1.0
            advantages = [(x - mean) / divisor if m else 0.0 for x, m in zip(advantages, flat, strict=True)]
    return advantages, returns, earned


@pytest.mark.parametrize("name", ALL)
@given(batch=batches(), data=st.data())
@quick
def test_estimator_equals_reference(name: str, batch: Batch, data: st.DataObject) -> None:
    quarters = st.integers(-8, 8).map(lambda n: n / 4)
    rewards = data.draw(st.lists(quarters, min_size=len(batch.masks), max_size=len(batch.masks)))
    sparse = st.one_of(st.just(0.0), st.just(0.0), quarters)
    steps = [data.draw(st.lists(sparse, min_size=n, max_size=n)) for n in batch.lengths]
    baselines = data.draw(st.lists(quarters, min_size=len(batch.masks), max_size=len(batch.masks)))
    settings = AdvantageSettings(
        gamma=data.draw(st.sampled_from([1.0, 0.9, 0.0])),
        lambd=data.draw(st.sampled_from([1.0, 0.95, 0.0])),
        kl_coef=data.draw(st.sampled_from([0.0, 0.1])),
        reward_clip_range=data.draw(st.sampled_from([None, (-1.0, 1.5)])),
        std_norm=data.draw(st.booleans()),
        pass_k=data.draw(st.integers(1, 4)),
    )
    kl, values = batch.normal(1), batch.normal(2)
    packed = RolloutColumns(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.tensor(batch.groups),
        action_mask=batch.mask,
        cu_seqlens=batch.cu_seqlens,
        kl=poison(kl, batch.mask),
        values=poison(values, batch.mask),
        step_rewards=torch.tensor([s for step in steps for s in step], dtype=torch.float64),
        baselines=torch.tensor(baselines, dtype=torch.float64),
    )
    result = compute_advantages(name, packed, settings)
    expected = reference(name, batch, rewards, steps, kl.tolist(), values.tolist(), settings, baselines)
    advantages, returns, earned = expected
    np.testing.assert_allclose(result.returns.numpy(), returns, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.advantages.numpy(), advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.token_rewards.numpy(), earned, rtol=1e-5, atol=1e-5)
    sums = [sum(earned[start:end]) for start, end in batch.bounds]
    np.testing.assert_allclose(result.sequence_returns.numpy(), sums, rtol=1e-5, atol=1e-5)
    assert result.advantages.dtype == torch.float32
    assert (result.advantages[~batch.mask] == 0).all() and (result.returns[~batch.mask] == 0).all()


# --- exact figures ---------------------------------------------------------------------------------


def test_uneven_groups_by_explicit_id_in_input_order() -> None:
    cols = columns([[1]] * 6, [1, 0, 7, 1, 2, 1], groups=[0, 1, 2, 0, 1, 0])
    mean_only = compute_advantages("dr_grpo", cols, AdvantageSettings()).advantages
    assert mean_only.tolist() == [0, -1, 0, 0, 1, 0]
    with_std = compute_advantages("group_norm", cols, AdvantageSettings()).advantages
    np.testing.assert_allclose(with_std, [0, -(0.5**0.5), 0, 0, 0.5**0.5, 0], rtol=1e-6)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_no_spread_gives_exact_zero_in_float32(name: str) -> None:
    cols = columns([[1, 1]] * 7, [0.7] * 7, groups=[4] * 7)
    result = compute_advantages(name, cols, AdvantageSettings())
    assert (result.advantages == 0).all() and (result.returns == 0).all()


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_one_outlier_in_a_group_stays_bounded(name: str) -> None:
    cols = columns([[1]] * 8, [0.0] + [0.7] * 7, groups=[0] * 8)
    advantages = compute_advantages(name, cols, AdvantageSettings(pass_k=1)).advantages
    assert advantages.isfinite().all() and advantages.abs().max() <= 10
    assert advantages[0] < 0 < advantages[1]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_single_sample_group_gives_zero(name: str) -> None:
    cols = columns([[1, 1], [1]], [3.0, -2.0], groups=[0, 1])
    assert (compute_advantages(name, cols, AdvantageSettings()).advantages == 0).all()
    assert ADVANTAGE_ESTIMATORS.get(name).needs_group


def test_batch_mean_baseline_needs_no_groups() -> None:
    cols = columns([[1], [1], [1]], [0.0, 1.0, 5.0])
    assert compute_advantages("flash_reinforce", cols, AdvantageSettings()).advantages.tolist() == [-2, -1, 3]
    assert not ADVANTAGE_ESTIMATORS.get("flash_reinforce").needs_group


def test_remax_compares_with_the_greedy_response() -> None:
    cols = columns([[1, 1], [1], [1]], [1.0, 0.0, 0.5], groups=[0, 0, 1], baselines=[0.75, 0.75, 0.5])
    assert compute_advantages("remax", cols, AdvantageSettings()).advantages.tolist() == [0.25, 0.25, -0.75, 0]
    with pytest.raises(ValueError, match="remax needs the rewards of greedy responses"):
        compute_advantages("remax", columns([[1]], [1.0]), AdvantageSettings())
    with pytest.raises(ValueError, match=r"1 of 1 baselines are missing or not finite; .*\{0: nan\}"):
        compute_advantages("remax", columns([[1]], [1.0], baselines=[math.nan]), AdvantageSettings())


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("rewards", [[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0.5, -2, 0.5, 3, 1, -2], [0] * 6])
def test_pass_at_k_equals_brute_force_over_all_subsets(rewards: list[float], k: int) -> None:
    cols = columns([[1]] * 6, rewards, groups=[0] * 6)
    got = compute_advantages("pass_at_k", cols, AdvantageSettings(pass_k=k)).advantages
    np.testing.assert_allclose(got, [best_of_subsets(rewards, i, k) for i in range(6)], rtol=1e-6, atol=1e-6)


def test_pass_at_k_is_the_papers_formula_for_right_and_wrong() -> None:
    n, wrong, k = 16, 13, 4
    rewards = [1.0] * (n - wrong) + [0.0] * wrong
    cols = columns([[1]] * n, rewards, groups=[0] * n)
    got = compute_advantages("pass_at_k", cols, AdvantageSettings(pass_k=k)).advantages.tolist()
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    assert got[0] == pytest.approx((1 - mean) / std)
    assert got[-1] == pytest.approx((1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std)
    # With fewer than k wrong ones every subset holds a right one.
    few = columns([[1]] * n, [0.0] * 3 + [1.0] * (n - 3), groups=[0] * n)
    assert (compute_advantages("pass_at_k", few, AdvantageSettings(pass_k=k)).advantages == 0).all()


def test_gae_skips_environment_tokens_and_padding() -> None:
    settings = AdvantageSettings(gamma=1.0, lambd=0.9)
    split = gae(columns([[1, 0, 0, 1]], [1.0], values=[0.2, 5, 5, 0.4]), settings)
    np.testing.assert_allclose(split.advantages, [0.74, 0, 0, 0.60], rtol=1e-6)
    np.testing.assert_allclose(split.returns, [0.94, 0, 0, 1.00], rtol=1e-6)
    padded = gae(columns([[1, 1, 0]], [1.0], values=[0.1, 0.3, 77]), AdvantageSettings(lambd=0.95))
    np.testing.assert_allclose(padded.advantages, [0.865, 0.70, 0], rtol=1e-6)
    trailing = columns([[1, 0, 0, 1, 0]], [1.0], values=[0.2, 5, 5, 0.4, 9], step_rewards=[0, 0, 0, 0, 1.0])
    moved = gae(trailing, settings)
    assert torch.equal(moved.advantages[:4], split.advantages) and moved.advantages[4] == 0
    assert torch.equal(moved.returns[:4], split.returns)


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_one_long_sequence_does_not_make_all_others_as_long(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout of 16,384 samples with one of 32,768 tokens would take gigabytes."""
    cells: list[int] = []
    together = advantages._discount_together

    def counting(rows: Sequence[np.ndarray], decay: float) -> None:
        cells.append(len(rows) * max(map(len, rows)))
        together(rows, decay)

    monkeypatch.setattr(advantages, "_discount_together", counting)
    monkeypatch.setattr(advantages, "GRID_CELLS", 100)
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 90, *[2, 7] * 30, 40]
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    mask = torch.rand(sum(lengths), generator=generator) > 0.2
    terms = torch.randn(sum(lengths), dtype=torch.float64, generator=generator)
    expected = torch.zeros_like(terms)
    for start, end in itertools.pairwise(bounds.tolist()):
        following = 0.0
        for t in reversed(range(start, end)):
            if mask[t]:
                following = expected[t] = terms[t] + decay * following
    assert torch.equal(advantages._discounted_sums(terms, decay, mask, bounds), expected)
    assert decay in (0.0, 1.0) or (len(cells) > 3 and max(cells) <= 100)


def test_terminal_reward_sits_on_the_last_action_token() -> None:
    cols = columns([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], [3.0, 3.0])
    placed = place_token_rewards(cols, cols.rewards, kl_coef=0.0, use_steps=True)
    assert placed.tolist() == [0, 0, 3, 0, 0, 0, 0, 0, 0, 3]


def test_step_rewards_are_parts_of_the_reward() -> None:
    """Two turns that earned 1 and 2, and a length penalty of 0.5 on the total."""
    cols = columns([[1, 0, 1]] * 2, [2.5, 2.5], groups=[0, 1], step_rewards=[1, 0, 2] * 2)
    settings = AdvantageSettings(std_norm=False)
    by_step = compute_advantages("reinforce", cols, settings)
    assert by_step.token_rewards.tolist() == [1, 0, 1.5] * 2
    assert by_step.returns.tolist() == [2.5, 0, 1.5] * 2
    assert by_step.sequence_returns.tolist() == [2.5, 2.5]
    uneven = columns([[1, 0, 1]] * 2, [2.5, 0.5], groups=[0, 0], step_rewards=[1, 0, 2, 1, 0, 0])
    outcome = compute_advantages("dr_grpo", uneven, settings)
    assert outcome.advantages.tolist() == [1, 0, 1, -1, 0, -1]  # one outcome for all tokens


def test_kl_penalty_in_the_reward() -> None:
    cols = columns([[0, 1, 1]], [0.0], kl=[9.0, 0.5, 0.5])
    result = compute_advantages("reinforce", cols, AdvantageSettings(kl_coef=0.1))
    np.testing.assert_allclose(result.token_rewards, [0, -0.05, -0.05], rtol=1e-6)
    off = compute_advantages("reinforce", cols, AdvantageSettings(kl_coef=0.0))
    assert (off.token_rewards == 0).all()
    without_reference = columns([[0, 1, 1]], [0.0])
    assert (compute_advantages("reinforce", without_reference, AdvantageSettings()).token_rewards == 0).all()


def test_baseline_then_clip_then_kl() -> None:
    cols = columns([[1], [1]], [8.0, 0.0], groups=[0, 0], kl=[1.0, 1.0])
    settings = AdvantageSettings(kl_coef=0.5, reward_clip_range=(-3.0, 3.0))
    # 8 - 4 = 4, clipped to 3, minus the penalty; clipping before the baseline would give 1.5 - 0.5
    assert compute_advantages("dr_grpo", cols, settings).advantages.tolist() == [2.5, -3.5]


def test_whitening_takes_the_population_of_unmasked_tokens() -> None:
    expected = [-1.2247, -1.2247, 0.8165, 0.8165, 0.8165]
    values = torch.tensor([1.0, 1, 9, 3, 3, 3, 9])
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    np.testing.assert_allclose(whiten(values, mask)[mask], expected, atol=1e-4)


def test_whitening_of_equal_or_no_values() -> None:
    mask = torch.tensor([True, True, True, False])
    assert (whiten(torch.tensor([0.7, 0.7, 0.7, math.nan]), mask) == 0).all()
    assert (whiten(torch.tensor([0.1] * 3, dtype=torch.float64).repeat(100), torch.ones(300).bool()) == 0).all()
    assert (whiten(torch.tensor([math.nan] * 2), torch.zeros(2).bool()) == 0).all()


def test_no_std_norm_only_centres() -> None:
    cols = columns([[1]] * 3, [1.0, 2.0, 6.0])
    centred = compute_advantages("reinforce", cols, AdvantageSettings(std_norm=False)).advantages
    assert centred.tolist() == [-2, -1, 3]


@pytest.mark.parametrize("name", ALL)
def test_sequence_without_actions_disturbs_nothing(name: str) -> None:
    cols = columns([[0, 0], [1, 1], [1]], [5.0, 1.0, 0.0], groups=[1, 0, 0], values=[math.nan] * 2 + [0.5] * 3,
                   baselines=[0.5] * 3)  # fmt: skip
    result = compute_advantages(name, cols, AdvantageSettings())
    assert result.advantages.isfinite().all()
    assert result.sequence_returns[0] == 0 and (result.advantages[:2] == 0).all()


def test_all_sequences_without_actions() -> None:
    result = compute_advantages("reinforce", columns([[0], [0, 0]], [1.0, 2.0]), AdvantageSettings())
    assert (result.advantages == 0).all()


def test_missing_rewards_are_named() -> None:
    cols = columns([[1]] * 4, [0.0, math.nan, 1.0, math.inf])
    with pytest.raises(ValueError, match=r"2 of 4 rewards .*\{1: nan, 3: inf\}"):
        compute_advantages("reinforce", cols, AdvantageSettings())


def test_broken_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"kl is NaN or infinite on action tokens of samples \[1\]"):
        compute_advantages("reinforce", columns([[1], [1]], [0, 1], kl=[0, math.nan]), AdvantageSettings())
    with pytest.raises(ValueError, match="gae needs the critic"):
        compute_advantages("gae", columns([[1]], [0]), AdvantageSettings())
    with pytest.raises(ValueError, match=r"rewards has shape \(2,\), expected \(1,\)"):
        compute_advantages("reinforce", columns([[1]], [0, 1], groups=[0]), AdvantageSettings())
    with pytest.raises(ValueError, match="values has shape"):
        compute_advantages("gae", columns([[1]], [0], values=[0, 1]), AdvantageSettings())
    with pytest.raises(ValueError, match="unknown advantage estimator 'grpo'.*known: gae"):
        compute_advantages("grpo", columns([[1]], [0]), AdvantageSettings())


def test_group_statistics_of_one_and_many() -> None:
    stats = group_statistics(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([7, 2, 7]))
    assert stats.count.tolist() == [2, 1, 2] and stats.mean.tolist() == [2, 5, 2]
    np.testing.assert_allclose(stats.std, [2**0.5, 0, 2**0.5])
    assert stats.constant.tolist() == [False, True, False]


def test_registered_estimator_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))

    @register_advantage_estimator("test_constant", needs_group=True)
    def constant(cols: RolloutColumns, settings: AdvantageSettings):
        result = ADVANTAGE_ESTIMATORS.get("reinforce").function(cols, settings)
        return type(result)(torch.full_like(result.advantages, 2.0), result.returns, result.token_rewards, cols.rewards)

    got = compute_advantages("test_constant", columns([[0, 1]], [1.0]), AdvantageSettings())
    assert got.advantages.tolist() == [0, 2]
    with pytest.raises(ValueError, match="already registered"):
        register_advantage_estimator("test_constant")(constant)
