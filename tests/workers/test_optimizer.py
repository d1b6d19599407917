"""The learning-rate schedule and the parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from openrlhf.config import SFTConfig
from openrlhf.config.limits import SCHEDULERS
from openrlhf.workers.muon import MuonSpec, hidden_matrices, orthogonalize
from openrlhf.workers.optimizer import (
    OptimizerSpec,
    SchedulerSpec,
    build_optimizer,
    build_scheduler,
    optimizer_spec,
    schedule,
)


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
        ("cosine_with_min_lr", 0.1),
        ("cosine_warmup_with_min_lr", 0.1),
        ("inverse_sqrt", None),
    ],
)
def test_every_schedule_that_is_a_function_of_the_step(name: str, last: float | None) -> None:
    seen = rates(SchedulerSpec(name, 20, warmup_ratio=0.1))
    assert 0 < seen[0] <= 1 and all(0 <= rate <= 1 for rate in seen)
    if last is not None:
        assert seen[-1] == pytest.approx(last, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_parts_of_steps_take_the_schedule_as_far_as_whole_ones(name: str, warmup: float) -> None:
    """Three optimizer steps for each step of the schedule, then one for two; and a resume between them."""
    spec = SchedulerSpec(name, 8, warmup_ratio=warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_scheduler(optimizer, spec, 2.0)
    seen = []
    for progress in [1 / 3] * 12 + [2.0, 1.0, 0.5, 0.5]:
        scheduler.prepare(progress)
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        state = scheduler.state_dict()
        optimizer.param_groups[0]["lr"] = 2.0
        scheduler = build_scheduler(optimizer, spec, 2.0)
        scheduler.load_state_dict(state)
    factor = schedule(spec, 2.0)
    places = [*(k / 3 for k in range(1, 13)), 6, 7, 7.5, 8]
    assert seen == pytest.approx([2 * factor(place) for place in places], rel=1e-7, abs=1e-12)
    whole = rates(spec, lr=2.0)
    assert [seen[k] for k in (2, 5, 8, 11, 12, 13, 15)] == pytest.approx([whole[k] for k in (0, 1, 2, 3, 5, 6, 7)])
    assert all(rate > 0 for rate in seen[:-1])
    if warmup:
        assert seen[:6] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2] if name != "constant" else [2] * 6)


def test_parts_add_up_to_whole_steps() -> None:
    scheduler = build_scheduler(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), SchedulerSpec("linear", 9), 1.0
    )
    for _ in range(10):
        scheduler.prepare(0.1)
        scheduler.step()
    assert scheduler.done == 1.0  # and not 0.9999999999999999


def test_the_state_of_a_scheduler_of_torch_is_gone_on_from() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(3):
        optimizer.step()
        before.step()
    scheduler = build_scheduler(optimizer, SchedulerSpec("cosine", 8), 2.0)
    scheduler.load_state_dict(before.state_dict())
    assert (scheduler.done, optimizer.param_groups[0]["lr"]) == (3, rates(SchedulerSpec("cosine", 8), lr=2.0)[3])


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
def test_both_cosines_with_a_least_rate_are_the_same_here(warmup: float) -> None:
    """transformers counts the steps of one from 0, of the other from 1; ours was a step ahead and rose at the end."""
    one, other = (
        rates(SchedulerSpec(name, 20, warmup_ratio=warmup))
        for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
    )
    assert one == pytest.approx(other, abs=1e-12)
    assert other[-1] == pytest.approx(0.1) and min(other) >= 0.05


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("total", [1, 2, 7])
def test_a_warm_up_as_long_as_the_run_ends_at_the_peak(name: str, total: int) -> None:
    """linear ended at 0, so that a run of one step changed nothing, and polynomial divided by 0."""
    seen = rates(SchedulerSpec(name, total, warmup_ratio=1.0))
    line = [1.0] * total if name == "constant" else [(step + 1) / total for step in range(total)]
    assert seen == pytest.approx(line)
    for ratio in (0.0, 0.03):
        assert rates(SchedulerSpec(name, 1, warmup_ratio=ratio), lr=0.5) == [0.5]


def test_biases_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerSpec(1e-3, weight_decay=0.1), offload=False)
    by_decay = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert [tuple(p.shape) for p in by_decay[0.1]] == [(4, 3)]
    assert [tuple(p.shape) for p in by_decay[0.0]] == [(4,), (4,), (4,)]


@pytest.mark.parametrize("offload", [False, True])
def test_flags_of_the_optimizer_reach_it(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's kernel has the names of torch's AdamW; without adamw_mode it would decay by the gradient."""

    class Kernel(torch.optim.AdamW):
        def __init__(self, groups: Any, adamw_mode: bool = False, **options: Any) -> None:
            assert adamw_mode
            super().__init__(groups, **options)

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", Kernel)
    cfg = SFTConfig(adam_betas=(0.8, 0.9), adam_eps=1e-5, l2=0.2)
    optimizer = build_optimizer(nn.Linear(3, 4), optimizer_spec(cfg, 3e-4), offload)
    assert isinstance(optimizer, Kernel) == offload
    found = [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [(3e-4, (0.8, 0.9), 1e-5, 0.2), (3e-4, (0.8, 0.9), 1e-5, 0.0)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_flags_of_muon_reach_it(dtype: str) -> None:
    cfg = SFTConfig(
        optim="muon", muon_lr=0.03, muon_momentum=0.7, muon_ns_steps=3, muon_nesterov=False, param_dtype=dtype
    )
    spec = optimizer_spec(cfg, 3e-4)
    work = torch.float32 if dtype == "fp32" else torch.bfloat16
    assert (spec.lr, spec.muon) == (3e-4, MuonSpec(0.03, 0.7, 3, False, work))
    # What has no hidden matrix is AdamW's alone.
    assert isinstance(build_optimizer(nn.LayerNorm(4), spec, offload=False), torch.optim.AdamW)


def test_nothing_to_train() -> None:
    with pytest.raises(RuntimeError, match="no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerSpec(1e-3), offload=False)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 8)])
@pytest.mark.parametrize("steps", [1, 5])
def test_orthogonalize_changes_singular_values_only(shape: tuple[int, ...], steps: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm(dim=(-2, -1))[..., None]
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    scale = max(1.0, shape[-2] / shape[-1]) ** 0.5
    expected = u @ torch.diag_embed(s) @ vt * scale
    torch.testing.assert_close(orthogonalize(matrix, steps, torch.float64), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        orthogonalize(matrix.float(), steps, torch.bfloat16).double(), expected, atol=0.1, rtol=0
    )


@pytest.mark.parametrize("tied", [False, True])
def test_muon_gets_experts_and_matrices_but_no_embeddings_heads_or_norms(tied: bool) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 6, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 3}
    config = Qwen3MoeConfig(vocab_size=16, tie_word_embeddings=tied, mlp_only_layers=[], **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    chosen = hidden_matrices(model)
    names = {name.removeprefix("model.layers.0.") for name, p in model.named_parameters() if p in chosen}
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert names == {*attention, "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    spec = OptimizerSpec(1e-3, weight_decay=0.1, muon=MuonSpec(lr=0.02))
    optimizer = build_optimizer(model, spec, offload=False)
    settings = [(g["muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert settings == [(False, 1e-3, 0.1), (False, 1e-3, 0.0), (True, 0.02, 0.1)]
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))


def test_muon_without_nesterov_follows_the_momentum() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    before, grads = model[0].weight.detach().clone(), [torch.randn(4, 3), torch.randn(4, 3)]
    muon = MuonSpec(lr=0.1, momentum=0.8, ns_steps=2, nesterov=False)
    optimizer = build_optimizer(model, OptimizerSpec(1e-3, muon=muon), offload=False)
    for grad in grads:
        model[0].weight.grad = grad
        optimizer.step()
    first, second = 0.2 * grads[0], 0.8 * 0.2 * grads[0] + 0.2 * grads[1]
    moved = orthogonalize(first, 2, torch.float32) + orthogonalize(second, 2, torch.float32)
    torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * moved)
