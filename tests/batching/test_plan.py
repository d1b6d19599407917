"""Batch plans: limits, completeness, equal counts, balance, determinism; optimizer steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.batching.plan import (
    BatchPlan,
    _fill,
    plan_micro_batches,
    sequence_cost,
    split_optimizer_steps,
)

quick = settings(max_examples=150, deadline=None, derandomize=True)


def members(plan: BatchPlan) -> list[int]:
    return sorted(i for rank in plan for batch in rank for i in batch)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    ranks=st.integers(1, 5),
    micro_batch_size=st.none() | st.integers(1, 8),
    max_tokens=st.none() | st.integers(40, 120),
)
@quick
def test_every_plan_keeps_its_promises(
    lengths: list[int], ranks: int, micro_batch_size: int | None, max_tokens: int | None
) -> None:
    if micro_batch_size is None and max_tokens is None:
        max_tokens = 64
    plan = plan_micro_batches(lengths, ranks, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    assert members(plan) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert all(len(batches) == len(plan[0]) for batches in plan)
    for batches in plan:
        for batch in batches:
            assert micro_batch_size is None or len(batch) <= micro_batch_size
            assert max_tokens is None or sum(lengths[i] for i in batch) <= max_tokens
    again = plan_micro_batches(lengths, ranks, micro_batch_size=micro_batch_size, max_tokens=max_tokens)
    assert again == plan
    if max_tokens is None and micro_batch_size is not None:
        needed = -(-len(lengths) // micro_batch_size)
        assert len(plan[0]) == -(-needed // ranks)
    # no more micro-batches than two half-full ones for each that is needed
    if micro_batch_size is None and max_tokens is not None and lengths:
        assert len(plan[0]) * ranks < 2 * sum(lengths) / max_tokens + 1 + ranks


def test_token_cap_is_never_exceeded() -> None:
    plan = plan_micro_batches([6, 6, 6, 5], 1, max_tokens=10)
    assert len(plan[0]) == 4 and members(plan) == [0, 1, 2, 3]
    two = plan_micro_batches([6, 6, 6, 5], 2, max_tokens=11)
    assert len(two[0]) == 2  # {6}, {6}, {6, 5} and an empty one, or {6}, {6}, {6}, {5}
    assert members(two) == [0, 1, 2, 3]


def test_what_is_longer_than_a_micro_batch_is_alone_in_one_and_raises_no_limit() -> None:
    def sizes(lengths: list[int], ranks: int = 1) -> list[list[list[int]]]:
        plan = plan_micro_batches(lengths, ranks, max_tokens=10, longer_alone=True)
        assert members(plan) == list(range(len(lengths))) and len({len(batches) for batches in plan}) == 1
        return [[[lengths[i] for i in batch] for batch in batches] for batches in plan]

    assert sizes([6, 14]) == [[[14], [6]]]
    assert sizes([6, 6, 14]) == [[[14], [6], [6]]]
    assert sizes([4] * 14 + [14]) == [[[14], *[[4, 4]] * 7]]
    assert sorted(sizes([6, 4, 14], ranks=2)) == [[[6, 4]], [[14]]]
    assert sorted(sizes([30, 14, 5], ranks=2)) == [[[14], [5]], [[30], []]]
    with pytest.raises(ValueError, match="max_tokens must be"):
        plan_micro_batches([1], 1, max_tokens=0, longer_alone=True)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    token_cap=st.integers(40, 90),
    count_cap=st.integers(1, 8),
    count=st.none() | st.integers(1, 30),
)
@quick
def test_bins_are_filled_as_by_looking_at_each_of_them(
    lengths: list[int], token_cap: int, count_cap: int, count: int | None
) -> None:
    costs = [0.0 if count is None else sequence_cost(length) for length in lengths]
    bins: list[list[int]] | None = [[] for _ in range(count or 0)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        assert bins is not None
        fitting = [
            b
            for b, own in enumerate(bins)
            if sum(lengths[j] for j in own) + lengths[i] <= token_cap and len(own) < count_cap
        ]
        if not fitting and count is not None:
            bins = None
            break
        if not fitting:
            bins.append([])
            fitting = [len(bins) - 1]
        loads = {b: sum((costs[j] for j in bins[b]), 0.0) for b in fitting}
        bins[min(fitting, key=lambda b: (loads[b], b))].append(i)
    assert _fill(lengths, costs, token_cap, count_cap, count) == bins


def test_tight_packing_is_found_where_balancing_fails() -> None:
    # longest first to the emptiest leaves {5, 2}, {4, 3} and no room for a 2; first fit has {5, 3}, {4, 2, 2}
    plan = plan_micro_batches([4, 3, 2, 2, 5], 1, max_tokens=8)
    assert plan == [[[1, 4], [0, 2, 3]]]


def test_fewer_sequences_than_ranks() -> None:
    plan = plan_micro_batches([5], 3, micro_batch_size=4)
    assert sorted(plan) == [[[]], [[]], [[0]]]
    assert plan_micro_batches([], 2, max_tokens=8) == [[], []]


def test_ranks_and_concurrent_micro_batches_are_balanced() -> None:
    lengths = [4000, 100, 100, 100, 3900, 100, 100, 100, 2000, 2100, 2050, 1950]
    lengths = [25 * n for n in lengths]  # so long that attention is what costs
    plan = plan_micro_batches(lengths, 2, max_tokens=25 * 4500)
    work = [[sum(sequence_cost(lengths[i]) for i in batch) for batch in batches] for batches in plan]
    totals = [sum(batches) for batches in work]
    assert max(totals) / min(totals) < 1.1
    # ranks wait for each other at every micro-batch
    waiting = sum(max(pair) for pair in zip(*work, strict=True))
    assert waiting < 1.15 * sum(totals) / 2


@pytest.mark.parametrize(("limits", "least"), [({"micro_batch_size": 4}, 0.92), ({"max_tokens": 8000}, 0.98)])
@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_lengths_are_balanced(seed: int, limits: dict[str, int], least: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.lognormal(6.0, 1.0, size=256).clip(1, 6000)]
    plan = plan_micro_batches(lengths, 4, **limits)
    work = [[sum(sequence_cost(lengths[i]) for i in batch) for batch in batches] for batches in plan]
    totals = [sum(batches) for batches in work]
    assert min(totals) > least * max(totals)
    assert sum(max(row) for row in zip(*work, strict=True)) < 1.08 * sum(totals) / 4
    assert all(batches == sorted(batches, reverse=True) for batches in work)  # dear ones first


def test_quadratic_cost_changes_the_balance() -> None:
    # 2,500 tokens against 4 x 625: nearly the same work
    short = plan_micro_batches([2500, 625, 625, 625, 625], 2, max_tokens=5000)
    assert sorted(short) == [[[0]], [[1, 2, 3, 4]]]
    # attention makes a sequence of 100,000 tokens dearer than the others together, although they have more
    long = plan_micro_batches([100_000, *[10_000] * 12], 2, max_tokens=200_000)
    assert sorted(long) == [[[0]], [list(range(1, 13))]]
    even = plan_micro_batches([50_000, 50_000, 10_000, 10_000], 2, max_tokens=120_000)
    assert sorted(even) == [[[0, 2]], [[1, 3]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1], "ranks": 0, "micro_batch_size": 1}, "ranks must be"),
        ({"lengths": [1], "ranks": 1}, "give micro_batch_size, max_tokens or both"),
        ({"lengths": [1], "ranks": 1, "micro_batch_size": 0}, "micro_batch_size must be"),
        ({"lengths": [1], "ranks": 1, "max_tokens": 0}, "max_tokens must be"),
        ({"lengths": [6, 14], "ranks": 1, "max_tokens": 10}, r"sequences \[1\] .* 10 tokens .* longest has 14"),
        ({"lengths": [3, 0], "ranks": 1, "max_tokens": 4}, r"sequences \[1\] have no tokens"),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(**arguments)


def test_large_rollout_is_planned_quickly() -> None:
    lengths = [1 + (i * 7919) % 2000 for i in range(4096)]
    plan = plan_micro_batches(lengths, 8, max_tokens=4096)
    assert members(plan) == list(range(4096))
    assert len(plan[0]) <= 1.15 * sum(lengths) / 4096 / 8 + 1


# --- optimizer steps -----------------------------------------------------------------------------------


@given(
    group_ids=st.lists(st.integers(0, 8), max_size=50),
    samples_per_step=st.integers(1, 12),
)
@quick
def test_steps_hold_every_sample_once_and_keep_groups_whole(group_ids: list[int], samples_per_step: int) -> None:
    steps = split_optimizer_steps(group_ids, samples_per_step)
    assert sorted(i for step in steps for i in step) == list(range(len(group_ids)))
    assert all(0 < len(step) <= samples_per_step for step in steps)
    for group in set(group_ids):
        holders = [s for s, step in enumerate(steps) if any(group_ids[i] == group for i in step)]
        if group_ids.count(group) <= samples_per_step:
            assert len(holders) == 1
        assert holders == list(range(holders[0], holders[-1] + 1))


def test_equal_groups_fill_steps_exactly() -> None:
    assert split_optimizer_steps([0, 0, 1, 1, 2, 2], 4) == [[0, 1, 2, 3], [4, 5]]
    # a group larger than a step is spread, and steps stay full: 12 samples are 3 steps of 4
    assert [len(s) for s in split_optimizer_steps([0] * 6 + [1] * 6, 4)] == [4, 4, 4]
    # a group that doesn't fit any more opens the next step
    assert split_optimizer_steps([0, 0, 0, 1, 1, 2], 4) == [[0, 1, 2], [3, 4, 5]]
    # interleaved arrival
    assert split_optimizer_steps([7, 5, 7, 5], 2) == [[0, 2], [1, 3]]


def test_ranks_with_unequal_shares_take_part_in_equally_many_steps() -> None:
    """8 samples in groups of 5 and 3, steps of 4, one sample a micro-batch, 2 ranks."""
    steps = split_optimizer_steps([0] * 5 + [1] * 3, 4)
    assert [len(step) for step in steps] == [4, 4]
    for step in steps:
        plan = plan_micro_batches([3] * len(step), 2, micro_batch_size=1)
        assert [len(rank) for rank in plan] == [2, 2] and members(plan) == [0, 1, 2, 3]


def test_step_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="samples_per_step"):
        split_optimizer_steps([0], 0)
