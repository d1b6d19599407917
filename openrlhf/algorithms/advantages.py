"""Advantage estimators: from rewards of samples to advantages of tokens.

All per-token columns are packed and follow one alignment: index ``t`` describes token ``t``. ``values[t]``
is the critic's value of the state *before* token ``t`` (everything up to ``t - 1``), the state in which the
token was chosen; so the temporal difference of an action is its reward plus the value at the *next action*
minus its own. Prompt, tool and environment tokens are no transitions: the recursions run over action tokens
only.

Order of the reward pipeline: length penalties (:mod:`openrlhf.algorithms.shaping`, before this module), group
baseline and scale, clip to ``reward_clip_range``, placement on action tokens, KL penalty per token.

A sequence's reward is one outcome: the group estimators put all of it on the last action token, so that every
token of the sequence has the same advantage (but for the KL penalty). ``gae`` and ``reinforce`` use the step
rewards of multi-turn episodes, which say where parts of that reward were earned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.packed import sequence_ids, zero_masked
from openrlhf.algorithms.registry import Registry

GROUP_STD_EPS = 1e-9
WHITEN_EPS = 1e-8


@dataclass(frozen=True)
class RolloutColumns:
    """One rollout (or a whole-group part of one) of ``S`` sequences and ``N`` tokens.

    Attributes:
        rewards: float ``[S]``, whole reward of each sequence, length penalties already applied.
        group_ids: int ``[S]``; samples of one prompt share an id, in any order and number.
        action_mask: bool ``[N]``, the policy sampled this token.
        cu_seqlens: int ``[S + 1]``, sequence offsets.
        kl: float ``[N]`` or None, estimated KL to the reference for each token.
        values: float ``[N]`` or None, critic values (of the state before each token).
        step_rewards: float ``[N]`` or None, the parts of ``rewards`` that were earned inside the sequence;
            the rest is earned at its end.
        baselines: float ``[S]`` or None, reward of the greedy response to each sequence's prompt.
    """

    rewards: Tensor
    group_ids: Tensor
    action_mask: Tensor
    cu_seqlens: Tensor
    kl: Tensor | None = None
    values: Tensor | None = None
    step_rewards: Tensor | None = None
    baselines: Tensor | None = None


@dataclass(frozen=True)
class AdvantageSettings:
    """Scalars of the estimators.

    Attributes:
        gamma: discount of each action token.
        lambd: GAE's lambda.
        kl_coef: weight of the KL penalty in the reward; 0 when the KL term is in the loss.
        reward_clip_range: bounds of the baseline-adjusted reward, or None.
        std_norm: whitening divides by the standard deviation (off: ``--no_advantage_std_norm``).
        pass_k: responses of which ``pass_at_k`` counts the best.
    """

    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0
    reward_clip_range: tuple[float, float] | None = None
    std_norm: bool = True
    pass_k: int = 4


@dataclass(frozen=True)
class Advantages:
    """Result, float32, zero wherever ``action_mask`` is False.

    Attributes:
        advantages: ``[N]``.
        returns: ``[N]``, the critic's targets; without a critic the discounted rewards to go.
        token_rewards: ``[N]``, what the recursion saw: placed rewards minus the KL penalty.
        sequence_returns: ``[S]``, sum of the token rewards.
    """

    advantages: Tensor
    returns: Tensor
    token_rewards: Tensor
    sequence_returns: Tensor


Estimator = Callable[[RolloutColumns, AdvantageSettings], Advantages]


@dataclass(frozen=True)
class EstimatorSpec:
    """A registered estimator and what it needs.

    Attributes:
        needs_critic: ``values`` must be given.
        needs_group: has no learning signal with one sample a prompt.
        needs_baseline: ``baselines`` must be given: every prompt gets a greedy response besides its samples.
        whiten: advantages are normalised over all action tokens afterwards.
    """

    function: Estimator
    needs_critic: bool = False
    needs_group: bool = False
    needs_baseline: bool = False
    whiten: bool = False


ADVANTAGE_ESTIMATORS: Registry[EstimatorSpec] = Registry("advantage estimator", "--advantage_estimator")


def register_advantage_estimator(name: str, **needs: bool) -> Callable[[Estimator], Estimator]:
    """Make ``function(columns, settings) -> Advantages`` available as ``--advantage_estimator name``.

    ``needs`` are the fields of :class:`EstimatorSpec`, all False where not given.
    """

    def decorate(function: Estimator) -> Estimator:
        ADVANTAGE_ESTIMATORS.add(name, EstimatorSpec(function, **needs))
        return function

    return decorate


def compute_advantages(estimator: str, columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """Run an estimator by name.

    Args:
        estimator: registered name.
        columns: the rollout; groups must be complete.
        settings: scalars.

    Raises:
        ValueError: unknown name, wrong shapes, a reward that is missing or not finite (with the sample
            indices), or no critic values or baselines where the estimator needs them.
    """
    spec = ADVANTAGE_ESTIMATORS.get(estimator)
    _check_columns(estimator, spec, columns)
    result = spec.function(columns, settings)
    advantages = zero_masked(result.advantages, columns.action_mask)
    returns = zero_masked(result.returns, columns.action_mask).float()
    token_rewards, sequence_returns = result.token_rewards.float(), result.sequence_returns.float()
    del result  # before whitening needs as much memory again
    if spec.whiten:
        advantages = whiten(advantages, columns.action_mask, std_norm=settings.std_norm)
    return Advantages(advantages.float(), returns, token_rewards, sequence_returns)


def _check_columns(name: str, spec: EstimatorSpec, columns: RolloutColumns) -> None:
    samples, tokens = columns.cu_seqlens.numel() - 1, columns.action_mask.numel()
    if int(columns.cu_seqlens[-1]) != tokens:
        raise ValueError(f"cu_seqlens ends at {int(columns.cu_seqlens[-1])}, but action_mask has {tokens} tokens")
    for field in ("rewards", "group_ids", "baselines"):
        column = getattr(columns, field)
        if column is not None and column.shape != (samples,):
            raise ValueError(f"{field} has shape {tuple(column.shape)}, expected ({samples},): one entry a sequence")
    if columns.action_mask.dtype != torch.bool:
        raise ValueError(f"action_mask must be bool, got {columns.action_mask.dtype}")
    for field in ("kl", "values", "step_rewards"):
        column = getattr(columns, field)
        if column is None:
            continue
        if column.shape != (tokens,):
            shape = tuple(column.shape)
            raise ValueError(f"{field} has shape {shape}, expected ({tokens},): one entry a token")
        bad = (columns.action_mask & ~column.isfinite()).nonzero().flatten()
        if bad.numel():
            where = sequence_ids(columns.cu_seqlens, tokens)[bad].unique().tolist()
            raise ValueError(f"{field} is NaN or infinite on action tokens of samples {where[:20]}")
    if spec.needs_critic and columns.values is None:
        raise ValueError(f"--advantage_estimator {name} needs the critic's values, but none were given")
    if spec.needs_baseline and columns.baselines is None:
        raise ValueError(f"--advantage_estimator {name} needs the rewards of greedy responses, but none were given")
    for field, rewards in (("rewards", columns.rewards), ("baselines", columns.baselines)):
        broken = [] if rewards is None else (~rewards.isfinite()).nonzero().flatten().tolist()
        if rewards is not None and broken:
            shown = {i: float(rewards[i]) for i in broken[:10]}
            raise ValueError(
                f"{len(broken)} of {samples} {field} are missing or not finite; sample index: value = {shown}. "
                "Check the reward function or server for these samples"
            )


# --- rewards of tokens ----------------------------------------------------------------------------


def _action_positions(mask: Tensor, cu_seqlens: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Packed index of every action token ``[A]``, and the place of each sequence's first one among them ``[S + 1]``.

    A rollout has tens of millions of tokens. NumPy takes and puts some of them many times as fast as torch does.
    """
    positions = np.flatnonzero(mask.numpy())
    return positions, np.searchsorted(positions, cu_seqlens.numpy())


def place_token_rewards(columns: RolloutColumns, outcomes: Tensor, kl_coef: float, *, use_steps: bool) -> Tensor:
    """Rewards of tokens, float64 ``[N]``, nonzero on action tokens only; without KL they sum to ``outcomes``.

    The outcome, less the step rewards, goes to the last action token. A step reward at a position that is no
    action goes to the last action before it (it rewards what led there), or to the first action if there is
    none before. Sequences without actions get nothing.

    Args:
        columns: the rollout.
        outcomes: float ``[S]``, baseline-adjusted and clipped reward of each sequence.
        kl_coef: the penalty ``kl_coef * kl[t]`` is taken off each action token.
        use_steps: whether step rewards stay where they were earned.
    """
    mask, cu_seqlens = columns.action_mask, columns.cu_seqlens
    rewards = torch.zeros(mask.numel(), dtype=torch.float64)
    positions, bounds = _action_positions(mask, cu_seqlens)
    first, last = bounds[:-1], bounds[1:] - 1
    has_action = first <= last
    if use_steps and columns.step_rewards is not None:
        steps = columns.step_rewards.double()
        outcomes = outcomes - _sequence_sums(steps, cu_seqlens)
        earned = np.flatnonzero(steps.numpy())
        sequence = np.searchsorted(cu_seqlens.numpy(), earned, side="right") - 1
        earned, sequence = earned[has_action[sequence]], sequence[has_action[sequence]]
        before = np.searchsorted(positions, earned, side="right") - 1
        target = positions[np.maximum(before, first[sequence])]
        rewards.index_add_(0, torch.from_numpy(target), steps[torch.from_numpy(earned)])
    rewards.numpy()[positions[last[has_action]]] += outcomes.double().numpy()[has_action]
    if columns.kl is not None and kl_coef != 0:
        rewards -= zero_masked(columns.kl, mask).double().mul_(kl_coef)
    return rewards


def _clip(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    if settings.reward_clip_range is None:
        return rewards
    return rewards.clamp(*settings.reward_clip_range)


# --- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of each sample's group, all ``[S]`` in sample order, float64."""

    count: Tensor
    mean: Tensor
    std: Tensor
    constant: Tensor
    """True where all rewards of the group are equal (a group of one included)."""


def group_statistics(rewards: Tensor, group_ids: Tensor, weights: Tensor | None = None) -> GroupStatistics:
    """Mean and sample standard deviation (n - 1; 0 for one sample) of each sample's own group.

    With ``weights`` ``[S]`` the mean is the weighted one (the deviation is still taken around it).
    """
    rewards = rewards.double()
    weights = torch.ones_like(rewards) if weights is None else weights.double()
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(count.numel())
    total_weight = zeros.index_add(0, group, weights)
    weighted = zeros.index_add(0, group, weights * rewards)
    mean = (weighted / torch.where(total_weight > 0, total_weight, 1.0))[group]
    squares = zeros.index_add(0, group, (rewards - mean) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()[group]
    low = zeros.scatter_reduce(0, group, rewards, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group, rewards, "amax", include_self=False)
    constant = (low == high)[group]
    return GroupStatistics(count[group], mean, torch.where(constant, 0.0, std), constant)


def _group_advantages(
    columns: RolloutColumns, settings: AdvantageSettings, outcomes: Tensor, constant: Tensor
) -> Advantages:
    """Clip the baseline-adjusted rewards ``[S]`` and give them to all tokens.

    Where the rewards of a group are all equal there is nothing to learn: they become exactly 0.
    """
    return _discounted(columns, settings, _clip(outcomes, settings).masked_fill(constant, 0.0), use_steps=False)


@functools.cache
def _subset_shares(count: int, k: int) -> Tensor:
    """Shares among the ``k``-subsets of ``count`` ranked samples, float64 ``[3, count]``, by rank from the lowest.

    Rows: of all subsets, those whose best is this rank; of the subsets that hold a given sample, those whose best
    it is, and those whose best is this rank, where it is above the given one's.
    """
    ranks, holding = range(count), math.comb(count - 1, k - 1)
    best = [math.comb(rank, k - 1) / math.comb(count, k) for rank in ranks]
    own = [math.comb(rank, k - 1) / holding for rank in ranks]
    above = [math.comb(rank - 1, k - 2) / holding if rank and k > 1 else 0.0 for rank in ranks]
    return torch.tensor([best, own, above], dtype=torch.float64)


def _best_of_subsets(rewards: Tensor, k: int) -> Tensor:
    """How far subsets with each sample exceed all ``k``-subsets in their best reward, in deviations; ``[n]``."""
    ordered, order = rewards.double().sort()
    if k >= rewards.numel() or ordered[k - 1] == ordered[-1]:  # every subset has the same best
        return torch.zeros_like(ordered)
    best, own, above = _subset_shares(rewards.numel(), k)
    mean = (best * ordered).sum()
    std = (best * (ordered - mean) ** 2).sum().sqrt()
    higher = above * ordered
    expected = own * ordered + higher.flip(0).cumsum(0).flip(0) - higher
    return torch.empty_like(ordered).index_copy_(0, order, (expected - mean) / (std + GROUP_STD_EPS))


# --- recursions over action tokens ----------------------------------------------------------------


GRID_CELLS = 2**24
"""Numbers that a recursion lays out at a time (128 MiB): all sequences at the length of the longest may not fit."""


def _discounted_sums(terms: Tensor, decay: float, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """``x[i] = terms[i] + decay * x[i + 1]`` over each sequence's action tokens; 0 elsewhere. ``[N]``."""
    positions, bounds = _action_positions(mask, cu_seqlens)
    actions = terms.numpy()[positions]
    rows = np.split(actions, bounds[1:-1])
    if decay == 1.0:
        for row in rows:
            row[:] = np.cumsum(row[::-1])[::-1]
    elif decay != 0.0:
        rows.sort(key=len, reverse=True)
        while rows and len(rows[0]):
            count = max(1, GRID_CELLS // len(rows[0]))
            _discount_together(rows[:count], decay)
            rows = rows[count:]
    result = torch.zeros_like(terms)
    result.numpy()[positions] = actions
    return result


def _discount_together(rows: Sequence[np.ndarray], decay: float) -> None:
    """The recursion in place, one step of all rows at a time; the first row is the longest."""
    grid = np.zeros((len(rows[0]), len(rows)))
    for column, row in enumerate(rows):  # the zeros behind a row do not disturb the recursion
        grid[: len(row), column] = row
    for t in range(len(grid) - 2, -1, -1):
        grid[t] += decay * grid[t + 1]
    for column, row in enumerate(rows):
        row[:] = grid[: len(row), column]


def _next_action(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Value at the next action token of the same sequence; 0 after the last one and off the mask. ``[N]``."""
    positions, bounds = _action_positions(mask, cu_seqlens)
    following = np.append(values.numpy()[positions[1:]], 0.0)[: positions.size]
    following[bounds[1:][bounds[1:] > bounds[:-1]] - 1] = 0.0
    result = torch.zeros_like(values)
    result.numpy()[positions] = following
    return result


def _sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum of ``values[N]`` over each sequence, ``[S]``, without an index for every token."""
    return torch.segment_reduce(values, "sum", lengths=cu_seqlens.diff())


def _discounted(
    columns: RolloutColumns, settings: AdvantageSettings, outcomes: Tensor, *, use_steps: bool
) -> Advantages:
    token_rewards = place_token_rewards(columns, outcomes, settings.kl_coef, use_steps=use_steps)
    returns = _discounted_sums(token_rewards, settings.gamma, columns.action_mask, columns.cu_seqlens)
    return Advantages(returns, returns, token_rewards, _sequence_sums(token_rewards, columns.cu_seqlens))


def whiten(values: Tensor, mask: Tensor, *, std_norm: bool = True) -> Tensor:
    """Subtract the mean over all unmasked tokens and divide by their population standard deviation.

    Equal values give exactly 0. Masked tokens stay 0.
    """
    clean = zero_masked(values.double(), mask)
    count = mask.sum().clamp(min=1)
    mean = clean.sum() / count
    centred = clean.sub_(mean).masked_fill_(~mask, 0.0)
    std = (centred.square().sum() / count).sqrt()
    # rounding in the mean must not be blown up to a signal
    if std <= 1e-12 * mean.abs():
        return centred.zero_()
    return centred.div_(std + WHITEN_EPS) if std_norm else centred


# --- estimators -----------------------------------------------------------------------------------


@register_advantage_estimator("gae", needs_critic=True, whiten=True)
def gae(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """Generalised advantage estimation over action tokens (Schulman et al. 2016, arXiv:1506.02438).

    ``delta_i = r_i + gamma * V_{i+1} - V_i`` with ``V = 0`` after the last action;
    ``A_i = delta_i + gamma * lambda * A_{i+1}``; returns are ``A + V``.
    """
    assert columns.values is not None
    mask, cu_seqlens = columns.action_mask, columns.cu_seqlens
    outcomes = _clip(columns.rewards.double(), settings)
    token_rewards = place_token_rewards(columns, outcomes, settings.kl_coef, use_steps=True)
    values = zero_masked(columns.values.double(), mask)
    delta = _next_action(values, mask, cu_seqlens).mul_(settings.gamma).add_(token_rewards).sub_(values)
    advantages = _discounted_sums(delta, settings.gamma * settings.lambd, mask, cu_seqlens)
    return Advantages(advantages, values.add_(advantages), token_rewards, _sequence_sums(token_rewards, cu_seqlens))


@register_advantage_estimator("reinforce", whiten=True)
def reinforce(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++: discounted rewards to go, KL in the reward, global whitening (arXiv:2501.03262)."""
    return _discounted(columns, settings, _clip(columns.rewards.double(), settings), use_steps=True)


@register_advantage_estimator("flash_reinforce")
def flash_reinforce(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """FlashREINFORCE: the mean reward of the whole rollout is the baseline, one sample a prompt is enough.

    Meant for one optimizer step a rollout, with ``--loss_agg_mode seq-mean-token-mean`` and rollout
    correction gated by the sequence's ``binary_kl``. ``columns`` has to be the whole rollout.
    """
    batch = group_statistics(columns.rewards, torch.zeros_like(columns.group_ids))
    return _group_advantages(columns, settings, columns.rewards.double() - batch.mean, batch.constant)


@register_advantage_estimator("remax", needs_baseline=True)
def remax(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """ReMax: the baseline is the reward of the greedy response to the same prompt (arXiv:2310.10505)."""
    assert columns.baselines is not None
    outcomes = columns.rewards.double() - columns.baselines.double()
    return _group_advantages(columns, settings, outcomes, outcomes == 0)


@register_advantage_estimator("reinforce_baseline", needs_group=True, whiten=True)
@register_advantage_estimator("dr_grpo", needs_group=True)
def group_mean(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """The group's mean is subtracted, nothing is divided: Dr. GRPO (arXiv:2503.20783).

    With global whitening afterwards: REINFORCE++ with a baseline (arXiv:2501.03262).
    """
    group = group_statistics(columns.rewards, columns.group_ids)
    return _group_advantages(columns, settings, columns.rewards.double() - group.mean, group.constant)


@register_advantage_estimator("group_norm", needs_group=True)
def group_norm(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """GRPO: ``(r - mean) / (std + 1e-9)`` in the group, sample standard deviation (arXiv:2402.03300)."""
    group = group_statistics(columns.rewards, columns.group_ids)
    outcomes = (columns.rewards.double() - group.mean) / (group.std + GROUP_STD_EPS)
    return _group_advantages(columns, settings, outcomes, group.constant)


@register_advantage_estimator("rloo", needs_group=True)
def rloo(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """Leave-one-out: the baseline is the mean of the group's *other* rewards (arXiv:2402.14740)."""
    group = group_statistics(columns.rewards, columns.group_ids)
    others = (group.mean * group.count - columns.rewards.double()) / (group.count - 1).clamp(min=1)
    return _group_advantages(columns, settings, columns.rewards.double() - others, group.constant)


@register_advantage_estimator("opo", needs_group=True)
def opo(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """OPO: the baseline is the group's mean reward weighted by response length (arXiv:2505.23585)."""
    lengths = _sequence_sums(columns.action_mask.double(), columns.cu_seqlens)
    group = group_statistics(columns.rewards, columns.group_ids, weights=lengths)
    return _group_advantages(columns, settings, columns.rewards.double() - group.mean, group.constant)


@register_advantage_estimator("pass_at_k", needs_group=True)
def pass_at_k(columns: RolloutColumns, settings: AdvantageSettings) -> Advantages:
    """Pass@k training: ``k`` responses together earn the best one's reward (arXiv:2508.10751).

    A response's advantage is the mean over all subsets of ``k`` responses that hold it, each normalised by mean and
    standard deviation over all subsets of the group; in closed form, and for rewards of any values.
    """
    outcomes = torch.zeros_like(columns.rewards, dtype=torch.float64)
    for group in columns.group_ids.unique():
        members = columns.group_ids == group
        outcomes[members] = _best_of_subsets(columns.rewards[members], settings.pass_k)
    return _group_advantages(columns, settings, outcomes, outcomes == 0)
