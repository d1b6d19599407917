"""Optimizer steps of the engine, part of engine_cases.py: stages, layouts, kinds of weights, too little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from engine_base import ITEMS, PLANS, SCHEDULE, SPEC, TARGETS, Cases, plain_loop, raises
from model_cases import options, packed
from torch import Tensor

from openrlhf.algorithms.metrics import STEP, MetricSum
from openrlhf.batching import pack
from openrlhf.models.export import exported_weights
from openrlhf.models.loading import load_causal_lm, write_hf_folder
from openrlhf.models.logprobs import PolicyModel
from openrlhf.workers import deepspeed_engine
from openrlhf.workers.backoff import MemoryBackoff
from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine
from openrlhf.workers.messages import CUTS
from openrlhf.workers.muon import MuonSpec
from openrlhf.workers.offload import offload_engine
from openrlhf.workers.optimizer import build_scheduler

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"zero{z}": {"zero_stage": z} for z in range(4)},
    "zero2 padded": {"packing_samples": False},
    "zero2 overlap_comm": {"overlap_comm": True},
    "zero2 checkpointing": {"gradient_checkpointing": True},
    "zero3 checkpointing": {"zero_stage": 3, "gradient_checkpointing": True},
    "zero3 reentrant": {
        "zero_stage": 3,
        "gradient_checkpointing": True,
        "gradient_checkpointing_use_reentrant": True,
    },
    "zero2 adam_offload": {"adam_offload": True},
    **{f"zero{z} bf16": {"zero_stage": z, "param_dtype": "bf16"} for z in range(4)},
    "zero2 bf16 fp32 gradients": {"param_dtype": "bf16", "grad_accum_dtype": "fp32"},
}


def equality(cases: Cases) -> None:
    """The engine against a plain loop, for all stages and layouts."""
    torch.manual_seed(0)
    cases.results["plain"] = plain_loop(cases.model)
    for name, changes in VARIANTS.items():
        engine = cases.engine(**changes)
        rows = []
        for _ in range(3):
            loss, stats = cases.step(engine)
            rows.append([loss, stats.grad_norm, stats.lr])
        cases.results[f"steps {name}"] = rows
    cases.results["plain tied"] = plain_loop(cases.tied)
    for stage in (2, 3):
        engine = cases.engine(cases.tied, zero_stage=stage)
        figures = [cases.step(engine) for _ in range(3)]
        cases.results[f"tied zero{stage}"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]
    torch.manual_seed(5)
    cases.results["plain lora"] = plain_loop(cases.model, lora=True)
    for stage in (2, 3):
        torch.manual_seed(5)
        engine = cases.engine(zero_stage=stage, lora_rank=4)
        figures = [cases.step(engine) for _ in range(3)]
        cases.results[f"lora zero{stage}"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]


def muon_loop(path: str, spec: OptimizerSpec) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Three steps of a plain loop whose updates of matrices are made in float64, from singular values; the weights."""
    assert spec.muon is not None
    model = PolicyModel(load_causal_lm(path, options()))
    named = dict(model.hf_model.named_parameters())
    matrices = {name: torch.zeros_like(p).double() for name, p in named.items() if p.ndim == 2 and ".layers." in name}
    rest = [(n, p) for n, p in named.items() if n not in matrices]
    decays = [([p for _, p in rest if p.ndim == 2], spec.weight_decay), ([p for _, p in rest if p.ndim == 1], 0.0)]
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays]
    adam = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    schedule = build_scheduler(adam, SCHEDULE, spec.lr)
    rows = []
    for _ in range(3):
        loss = -model(packed(ITEMS)).logprobs.sum() / TARGETS
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        rate = adam.param_groups[0]["lr"]
        for name, momentum in matrices.items():
            weight, grad = named[name], named[name].grad.double()
            momentum.mul_(spec.muon.momentum).add_(grad, alpha=1 - spec.muon.momentum)
            u, s, vt = torch.linalg.svd(0.05 * grad + 0.95 * momentum, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            update = u @ s.diag() @ vt * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
            rate_here = spec.muon.lr * rate / spec.lr
            weight.data = (weight.double() * (1 - rate_here * spec.weight_decay) - rate_here * update).float()
        adam.step()
        model.zero_grad()
        schedule.step()
        rows.append([float(loss.detach()), norm, rate])
    return rows, {name: p.detach() for name, p in named.items()}


def muon(cases: Cases) -> None:
    """Muon in all stages: the steps of the reference, and the same bits after a resume."""
    for name, path in (("", cases.model), (" tied", cases.tied)):
        spec = replace(SPEC, muon=MuonSpec(0.02, 0.95))
        rows, expected = muon_loop(path, spec)
        cases.results[f"plain muon{name}"] = rows
        for stage in range(4) if not name else (2,):
            opts = options(zero_stage=stage)

            def start(opts: Any = opts, path: str = path, spec: OptimizerSpec = spec) -> TrainEngine:
                return TrainEngine(PolicyModel(load_causal_lm(path, opts)), opts, spec, SCHEDULE)

            engine = start()
            figures = [cases.step(engine) for _ in range(2)]
            root = cases.folder / f"muon{stage}_{cases.ranks}"
            resumable = stage > 1 and not name
            if resumable:
                engine.save_checkpoint(root, "step", {})
            figures += [cases.step(engine)]
            got = cases.weights(engine)
            cases.results[f"muon zero{stage}{name}"] = {
                "figures": [[loss, s.grad_norm, s.lr] for loss, s in figures],
                "gap": max(float((got[n] - expected[n]).abs().max()) for n in got),
            }
            if resumable:
                other = start()
                other.load_checkpoint(root)
                same = cases.step(other) == figures[-1]
                weights = cases.weights(other)
                cases.results[f"muon zero{stage} resumed"] = same and all(torch.equal(got[n], weights[n]) for n in got)
    for stage in (0, 3):
        opts = options(zero_stage=stage, param_dtype="bf16")
        coarse = replace(SPEC, muon=MuonSpec(0.02, 0.95, dtype=torch.bfloat16))
        engine = TrainEngine(PolicyModel(load_causal_lm(cases.model, opts)), opts, coarse, SCHEDULE)
        figures = [cases.step(engine) for _ in range(3)]
        cases.results[f"muon zero{stage} bf16"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]


def quantized(cases: Cases) -> None:
    """Adapters on 4-bit weights train as on the bf16 weights that these stand for, and go on after a resume."""
    qlora = {"param_dtype": "bf16", "lora_rank": 4, "load_in_4bit": True}
    dense = cases.folder / f"dense_{cases.ranks}"
    if cases.rank == 0:
        model = load_causal_lm(cases.model, options(**qlora)).bfloat16()
        plain = load_causal_lm(cases.model, options(param_dtype="bf16"))
        write_hf_folder(plain, {w.name: w.build() for w in exported_weights(model)}, dense)
    dist.barrier()

    def start(seed: int, path: Path | str, changes: dict[str, Any]) -> TrainEngine:
        torch.manual_seed(seed)
        return cases.engine(str(path), **changes)

    def losses(engine: TrainEngine) -> list[float]:
        return [cases.step(engine)[0] for _ in range(2)]

    cases.results["plain 4-bit"] = losses(start(5, dense, {**qlora, "load_in_4bit": False}))
    for stage in (2, 3):
        engine = start(5, cases.model, {**qlora, "zero_stage": stage})
        cases.results[f"4-bit zero{stage}"] = losses(engine)
        root = cases.folder / f"quantized{stage}_{cases.ranks}"
        engine.save_checkpoint(root, "step", {})
        resumed = start(6, cases.model, {**qlora, "zero_stage": stage})
        resumed.load_checkpoint(root)
        cases.results[f"4-bit zero{stage} resumed"] = losses(engine) == losses(resumed)
        weights = cases.weights(resumed)
        cases.results[f"4-bit zero{stage} meta"] = resumed.parameter_meta() == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()
        ]


def states_away(cases: Cases) -> None:
    """Steps with DeepSpeed's states offloaded in between: frozen weights, and an optimizer that is none of its own."""
    kinds = {"lora zero3": ({"lora_rank": 4}, SPEC), "muon zero3": ({}, replace(SPEC, muon=MuonSpec(0.02, 0.95)))}
    for name, (changes, spec) in kinds.items():
        torch.manual_seed(5)
        opts = options(zero_stage=3, **changes)
        engine = TrainEngine(PolicyModel(load_causal_lm(cases.model, opts)), opts, spec, SCHEDULE)
        figures = []
        for _ in range(3):
            figures.append(cases.step(engine))
            offload_engine(engine._engine, engine._stage)
            engine._engine.reload_states()
        cases.results[f"{name} away"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]


def half_precision(cases: Cases) -> None:
    """fp16, which is for GPUs: this CPU is said to be able to. The gradient of the third of four steps overflows."""
    for stage in range(4):
        with (
            mock.patch.object(CPU_Accelerator, "is_fp16_supported", lambda self: True),
            # the engine asks before it looks for the device
            mock.patch.object(deepspeed_engine, "on_gpu", mock.Mock(side_effect=chain([True], repeat(False)))),
        ):
            engine = cases.engine(zero_stage=stage, param_dtype="fp16")
        figures = [cases.step(engine) for _ in range(2)]
        before = cases.weights(engine)
        _, overflow = cases.step(engine, lambda loss: loss * 1e9)
        after = cases.weights(engine)
        figures.append(cases.step(engine))
        cases.results[f"steps zero{stage} fp16"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]
        kept = all(torch.equal(before[name], after[name]) for name in before)
        cases.results[f"overflow zero{stage}"] = [overflow.skipped, math.isinf(overflow.grad_norm), kept]
        cases.results[f"skipped zero{stage}"] = sum(s.skipped for _, s in figures)


ONE_BROKEN = "model.layers.1.mlp.down_proj.weight"


def poisoned(cases: Cases) -> None:
    """A NaN loss with a finite gradient, and the other way round, on the last rank: all ranks stop, weights
    stay. Then a NaN in the gradient of one weight."""

    class NaNGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float("nan")

    for stage, dtype in [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (2, "bf16"), (3, "bf16")]:
        engine = cases.engine(zero_stage=stage, param_dtype=dtype)
        cases.step(engine)
        before = cases.weights(engine)
        key = f"zero{stage} {dtype}"
        with raises(cases.results, f"nan loss {key}"):
            cases.step(engine, lambda loss: loss + float("nan"))
        with raises(cases.results, f"nan gradient {key}"):
            cases.step(engine, NaNGradient.apply)
        weight = dict(engine.hf_model.named_parameters())[ONE_BROKEN]
        hook = weight.register_hook(lambda grad: grad * float("nan")) if cases.rank == cases.ranks - 1 else None
        with raises(cases.results, f"one nan gradient {key}"):
            cases.step(engine)
        if hook is not None:
            hook.remove()
        with raises(cases.results, f"inf loss {key}"):
            cases.step(engine, lambda loss: loss + float("inf"))
        after = cases.weights(engine)
        cases.results[f"weights after nan {key}"] = all(torch.equal(before[n], after[n]) for n in before)
        cases.step(engine)
        cases.results[f"goes on {key}"] = bool(
            torch.isfinite(torch.cat([t.flatten() for t in cases.weights(engine).values()])).all()
        )


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@contextmanager
def limited_memory(engine: TrainEngine, tokens: int, place: str) -> Iterator[list[int]]:
    """Passes over more tokens fail in the first layer, after the second one's gradients when backward; their sizes."""
    failed: list[int] = []

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if output.shape[:-1].numel() <= tokens:
            return output
        failed.append(output.shape[:-1].numel())
        if place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return _FailingBackward.apply(output)

    handle = engine.hf_model.model.layers[0].register_forward_hook(hook)
    yield failed
    handle.remove()


def backoff(cases: Cases) -> None:
    """Micro-batches that do not fit: on one rank the steps are the plain loop's, on several the run says what to do."""
    plan = PLANS[cases.ranks][cases.rank]
    batches = [pack(ITEMS, {}, members) for members in plan]
    for stage, place in [(z, p) for z in range(4) for p in ("forward", "backward")]:
        engine = cases.engine(zero_stage=stage)
        cases.results[f"passes alone zero{stage}"] = [engine.passes_alone(t) for t in (True, False)]
        if not engine.passes_alone(training=True):
            continue
        runner, rows, cuts = MemoryBackoff(engine), [], []

        def loss_of(batch: Any, engine: TrainEngine = engine) -> tuple[Tensor, MetricSum]:
            loss, metrics = -engine(batch).logprobs.sum() / TARGETS, MetricSum()
            metrics.add("loss", loss, 1.0 / len(batch.sequence_index), STEP)
            return loss, metrics

        with limited_memory(engine, 9, place) as failed:
            for _ in range(3):
                metrics = runner.accumulate(batches, loss_of)
                stats = engine.step()
                loss = float(metrics.to_numbers()["loss"].total)
                rows.append([loss, stats.grad_norm, stats.lr])
                cuts.append(metrics.values()[CUTS])
        cases.results[f"backoff zero{stage} {place}"] = {"rows": rows, "cuts": cuts, "failed": failed}
    engine = cases.engine(zero_stage=2)
    runner = MemoryBackoff(engine)
    whole, run = pack(ITEMS, {}, range(len(ITEMS))), lambda batch: engine(batch).logprobs
    with torch.no_grad():
        expected = run(whole)
    with limited_memory(engine, 9, "forward") as failed:
        cases.results["backoff forward"] = [float((runner.forward(whole, run) - expected).abs().max()), failed]
    with limited_memory(engine, 5, "forward"), raises(cases.results, "backoff too long"):
        runner.forward(whole, run)
    with limited_memory(engine, 0, "forward"), raises(cases.results, "backoff training"):
        runner.accumulate(batches, lambda batch: (engine(batch).logprobs.sum(), MetricSum()))


PARTS = (equality, muon, quantized, states_away, half_precision, poisoned, backoff)
