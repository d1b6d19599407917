"""Length penalties and normalisation of scalar rewards."""

from __future__ import annotations

import pytest
import torch

from openrlhf.algorithms.shaping import (
    apply_length_penalties,
    overlong_penalty,
    stop_properly,
)


def test_overlong_penalty() -> None:
    penalty = overlong_penalty(torch.tensor([19, 5, 2, 0]), buffer=5, factor=1.0)
    assert penalty.tolist() == pytest.approx([0, 0, -0.6, -1.0])
    assert not penalty[0].signbit()
    assert overlong_penalty(torch.tensor([2]), buffer=5, factor=0.5).item() == pytest.approx(-0.3)


def test_stop_properly() -> None:
    rewards, truncated = torch.tensor([1.0, 1.0, -2.0]), torch.tensor([False, True, True])
    assert stop_properly(rewards, truncated, 0.5).tolist() == [1.0, 0.5, -1.0]
    assert stop_properly(rewards, truncated, 0.0).tolist() == [1.0, 0.0, 0.0]
    assert stop_properly(rewards, truncated, -0.5).tolist() == [1.0, -0.5, -0.5]


def test_penalties_compose() -> None:
    rewards = torch.tensor([1.0, 1.0, 1.0])
    room, truncated = torch.tensor([10, 2, 0]), torch.tensor([False, False, True])
    both = apply_length_penalties(rewards, room, truncated, overlong_buffer_len=5, stop_properly_penalty_coef=-0.5)
    assert both.tolist() == pytest.approx([1.0, 0.4, -0.5])
    assert torch.equal(apply_length_penalties(rewards, room, truncated), rewards)
