"""Metrics are reduced once, with the right weight, for every layout."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from algorithm_cases import Batch, batches, quick
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.metrics import GROUP, LATEST, SEQUENCE, STEP, TOKEN, MetricSum, WeightedMean


@pytest.mark.parametrize("layout", [[[1, 0, 1, 1, 0]], [[1, 0], [1, 1], [0]], [[1, 0], [0], [1, 1], []]])
def test_accuracy_is_the_same_in_every_layout(layout: list[list[int]]) -> None:
    parts = []
    for flags in layout:
        part = MetricSum()
        part.add_values("acc", flags, SEQUENCE)
        parts.append(part)
    assert MetricSum.merged(parts).values() == {"acc": 0.6}


def test_a_trajectory_counts_once_whatever_its_turns() -> None:
    metrics = MetricSum()
    for reward, turns in ((1.0, 1), (0.0, 4)):
        metrics.add_values("reward", [reward], SEQUENCE)
        metrics.add_values("turns", [turns], SEQUENCE)
    assert metrics.values() == {"reward": 0.5, "turns": 2.5}


def test_token_means_are_not_means_of_means() -> None:
    parts = []
    for tokens, kl in ((10, 0.1), (2, 0.7)):
        part = MetricSum()
        part.add_tokens({"kl": torch.full((tokens + 1,), kl)}, torch.arange(tokens + 1) < tokens)
        parts.append(part)
    assert MetricSum.merged(parts).values()["kl"] == pytest.approx(0.2)


@given(batch=batches(), cuts=st.lists(st.integers(0, 60), max_size=4))
@quick
def test_any_split_gives_the_same_means(batch: Batch, cuts: list[int]) -> None:
    column, mask = batch.normal(1), batch.mask
    bounds = [0, *sorted(min(c, len(mask)) for c in cuts), len(mask)]
    parts = []
    for a, b in zip(bounds, bounds[1:], strict=False):
        part = MetricSum()
        part.add_tokens({"x": column[a:b]}, mask[a:b])
        parts.append(pickle.loads(pickle.dumps(part)))
    values = MetricSum.merged(parts).values()
    if mask.any():
        assert values["x"] == pytest.approx(column[mask].mean().item(), abs=1e-12)
    else:
        assert values == {}


def test_masked_nan_is_ignored_and_unmasked_nan_is_shown() -> None:
    metrics = MetricSum()
    metrics.add_tokens({"a": torch.tensor([1.0, math.nan])}, torch.tensor([True, False]))
    metrics.add_tokens({"b": torch.tensor([1.0, math.nan])}, torch.tensor([True, True]))
    values = metrics.values()
    assert values["a"] == 1.0 and math.isnan(values["b"])


def test_kinds_do_not_mix() -> None:
    metrics = MetricSum()
    metrics.add("kl", 1.0, 2.0, TOKEN)
    with pytest.raises(ValueError, match="metric 'kl': cannot merge a mean over tokens .* over sequences"):
        metrics.add("kl", 1.0, 1.0, SEQUENCE)
    with pytest.raises(ValueError, match="unknown kind"):
        WeightedMean(1.0, 1.0, "batch")


def test_groups_steps_and_latest() -> None:
    metrics = MetricSum()
    metrics.add_values("group_reward_std", [0.0, 1.0], GROUP)
    metrics.add("grad_norm", 2.0, 1, STEP)
    metrics.add("grad_norm", 4.0, 1, STEP)
    metrics.set_latest("actor_lr", 1e-6)
    later = MetricSum({"actor_lr": WeightedMean(5e-7, 1.0, LATEST)})
    assert metrics.merge(later).values() == {"group_reward_std": 0.5, "grad_norm": 3.0, "actor_lr": 5e-7}
    assert metrics.values()["actor_lr"] == 1e-6  # merging leaves its parts alone
    assert metrics["grad_norm"].weight == 2


def test_nothing_measured_is_left_out() -> None:
    metrics = MetricSum()
    metrics.add_tokens({"kl": torch.zeros(3)}, torch.zeros(3).bool())
    assert metrics.values() == {}


def test_pickles_without_tensors_or_graph() -> None:
    metrics = MetricSum()
    loss = torch.ones(2, requires_grad=True).sum()
    metrics.add("loss", loss, torch.tensor(2), TOKEN)
    copy = pickle.loads(pickle.dumps(metrics))
    assert copy.values() == {"loss": 1.0} and isinstance(copy["loss"].total, float)
