"""The learning-rate schedule and the parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from openrlhf.workers.optimizer import OptimizerSpec, SchedulerSpec, build_optimizer, build_scheduler, schedule


def rates(spec: SchedulerSpec, lr: float = 1.0, steps: int | None = None) -> list[float]:
    """The rate of each optimizer step as training sees it."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))], lr=lr)
    scheduler = build_scheduler(optimizer, spec, lr)
    seen = []
    for _ in range(steps or spec.total_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("total", [1, 2, 27, 60])
def test_cosine_reaches_its_minimum_at_the_last_step_and_never_rises_after_the_warm_up(total: int) -> None:
    seen = rates(SchedulerSpec("cosine_with_min_lr", total, warmup_ratio=0.1, min_lr_ratio=0.1))
    assert len(seen) == total and all(rate > 0 for rate in seen)
    peak = seen.index(max(seen))
    assert peak == max(0, -(-total // 10) - 1)
    assert seen[peak:] == sorted(seen[peak:], reverse=True)
    if total > 2:
        assert seen[-1] == pytest.approx(0.1) and max(seen) == pytest.approx(1.0)


def test_schedule_stays_at_its_end() -> None:
    spec = SchedulerSpec("cosine_with_min_lr", 5, warmup_ratio=0.0, min_lr_ratio=0.2)
    assert rates(spec, steps=8)[4:] == pytest.approx([0.2] * 4)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("linear", 0.0),
        ("cosine", 0.0),
        ("constant", 1.0),
        ("constant_with_warmup", 1.0),
        ("cosine_with_restarts", 0.0),
        ("polynomial", 1e-7),
        ("warmup_stable_decay", 0.1),
        ("inverse_sqrt", None),
    ],
)
def test_every_schedule_that_is_a_function_of_the_step(name: str, last: float | None) -> None:
    seen = rates(SchedulerSpec(name, 20, warmup_ratio=0.1))
    assert 0 < seen[0] <= 1 and all(0 <= rate <= 1 for rate in seen)
    if last is not None:
        assert seen[-1] == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("name", ["nonsense", "reduce_lr_on_plateau"])
def test_other_schedules_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        schedule(SchedulerSpec(name, 10), 1.0)


def test_biases_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerSpec(1e-3, weight_decay=0.1), offload=False)
    by_decay = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert [tuple(p.shape) for p in by_decay[0.1]] == [(4, 3)]
    assert [tuple(p.shape) for p in by_decay[0.0]] == [(4,), (4,), (4,)]


def test_nothing_to_train() -> None:
    with pytest.raises(RuntimeError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerSpec(1e-3), offload=False)
