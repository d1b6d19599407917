"""What every role of train_ppo_ray does before its model is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from openrlhf.config import PPOConfig
from openrlhf.workers.model_worker import ROLE_WORKERS


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """What --full_determinism sets is a process's, not a test's."""
    with mock.patch.dict(os.environ), torch.random.fork_rng(devices=[]):
        yield
        torch.use_deterministic_algorithms(False)


def drawn(role: str, cfg: PPOConfig) -> Any:
    """What a role draws while it makes new weights, in a process whose generators stand anywhere."""
    kind = ROLE_WORKERS[role]
    worker = kind.__new__(kind)
    with mock.patch.object(kind, "_build", lambda *_: torch.rand(4)):
        torch.seed()
        worker.load(cfg, 1)
    return worker.engine


@pytest.mark.parametrize("role", ROLE_WORKERS)
def test_new_weights_follow_from_the_seed(role: str) -> None:
    cfg = replace(PPOConfig(), seed=7)
    assert torch.equal(drawn(role, cfg), torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(drawn(role, cfg), drawn(role, cfg))
    assert not torch.equal(drawn(role, cfg), drawn(role, replace(cfg, seed=8)))
    assert not torch.are_deterministic_algorithms_enabled()


def test_full_determinism_reaches_the_models() -> None:
    drawn("actor", replace(PPOConfig(), full_determinism=True))
    assert torch.are_deterministic_algorithms_enabled()
