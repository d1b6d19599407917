"""Run by test_deepspeed_engine.py on one or two gloo ranks: many cases in one start, results as JSON of rank 0.

Usage: engine_cases.py <folder>, with the rank in the environment
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, packed, reference_logprobs, sequences  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from openrlhf.algorithms.metrics import STEP, MetricSum  # noqa: E402
from openrlhf.batching import pack  # noqa: E402
from openrlhf.models import (  # noqa: E402
    PolicyModel,
    RewardModel,
    load_causal_lm,
    load_sequence_regression,
    load_tokenizer,
)
from openrlhf.models.export import exported_weights  # noqa: E402
from openrlhf.models.fused import fuse_elementwise  # noqa: E402
from openrlhf.models.loading import write_hf_folder  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402
from openrlhf.workers import checkpoint_files as files  # noqa: E402
from openrlhf.workers.backoff import MemoryBackoff, OutOfMemoryError  # noqa: E402
from openrlhf.workers.deepspeed_engine import (  # noqa: E402
    NonFiniteError,
    OptimizerSpec,
    SchedulerSpec,
    StepStats,
    TrainEngine,
)
from openrlhf.workers.distributed import all_reduce_sum, init_distributed, shutdown  # noqa: E402
from openrlhf.workers.messages import CUTS  # noqa: E402
from openrlhf.workers.muon import MuonSpec  # noqa: E402
from openrlhf.workers.offload import offload_engine  # noqa: E402
from openrlhf.workers.optimizer import build_optimizer, build_scheduler  # noqa: E402

LENGTHS = (3, 9, 2, 7, 8, 5)
ITEMS = sequences(LENGTHS, seed=1)
TARGETS = sum(LENGTHS) - len(LENGTHS)
SPEC = OptimizerSpec(1e-2, weight_decay=0.1)
SCHEDULE = SchedulerSpec("cosine_with_min_lr", 4)
# Uneven micro-batches, and on each number of ranks an empty one.
PLANS = {1: [[[0, 1], [2], [3, 4, 5], []]], 2: [[[0, 1], [2, 4], []], [[3], [], [5]]]}


class Cases:
    """The model folder, this rank's place, and the results so far."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.results: dict[str, Any] = {}
        self.model = str(folder / "model")
        self.tied = str(folder / "tied")
        if rank == 0:
            make_tiny_model(self.model, "qwen2")
            make_tiny_model(self.tied, "qwen3", tie=True)
        dist.barrier()

    def engine(self, path: str | None = None, zero3_init: bool | None = None, **changes: Any) -> TrainEngine:
        opts = options(**changes)
        model = load_causal_lm(path or self.model, opts, zero3_init=zero3_init)
        return TrainEngine(PolicyModel(model, opts.packing_samples), opts, SPEC, SCHEDULE)

    def step(self, engine: TrainEngine, poison: Callable[[Tensor], Tensor] | None = None) -> tuple[float, StepStats]:
        """One optimizer step over all items; the global loss, and the engine's figures."""
        local = 0.0
        plan = PLANS[self.ranks][self.rank]
        for index, members in enumerate(plan):
            loss = -engine(pack(ITEMS, {}, members)).logprobs.sum() / TARGETS
            if poison is not None and index == 0 and self.rank == self.ranks - 1:
                loss = poison(loss)
            local += float(loss.detach())
            engine.backward(loss, last=index == len(plan) - 1)
        return all_reduce_sum([local])[0], engine.step()

    def weights(self, engine: TrainEngine) -> dict[str, Tensor]:
        return {name: tensor.cpu() for bucket in engine.gathered_parameters(20_000) for name, tensor in bucket}


def plain_loop(path: str, lora: bool = False) -> list[list[float]]:
    """Loss, gradient norm and rate of three steps of a plain PyTorch loop, all tokens at once."""
    model = PolicyModel(load_causal_lm(path, options(lora_rank=4 if lora else 0)))
    optimizer = build_optimizer(model, SPEC, offload=False)
    schedule = build_scheduler(optimizer, SCHEDULE, SPEC.lr)
    rows = []
    for _ in range(3):
        loss = -model(packed(ITEMS)).logprobs.sum() / TARGETS
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rows.append([float(loss.detach()), float(norm), rate])
    return rows


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


def zero3_loading(cases: Cases) -> None:
    """Parameters partitioned while they are read are the same parameters."""
    whole = cases.weights(cases.engine(cases.tied, zero_stage=3, zero3_init=False))
    engine = cases.engine(cases.tied, zero_stage=3, zero3_init=True)
    parts = cases.weights(engine)
    cases.results["zero3_init equal"] = set(whole) == set(parts) and all(torch.equal(whole[n], parts[n]) for n in whole)
    cases.results["zero3_init steps"] = [cases.step(engine)[0] for _ in range(3)]
    for name, early in (("zero3 fused", False), ("zero3 partitioned fused", True)):
        opts = options(zero_stage=3)
        model = load_causal_lm(cases.model, opts, zero3_init=early)
        cases.results[f"{name} modules"] = fuse_elementwise(model)
        engine = TrainEngine(PolicyModel(model), opts, SPEC, SCHEDULE)
        figures = [cases.step(engine) for _ in range(3)]
        cases.results[f"steps {name}"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]
    opts = options(zero_stage=3, seed=3)
    head = load_sequence_regression(cases.model, opts, zero3_init=True)
    reward = TrainEngine(RewardModel(head), opts, SPEC)
    drawn = cases.weights(reward)["score.weight"]
    expected = load_sequence_regression(cases.model, opts).score.weight
    cases.results["zero3_init head"] = {"std": float(drawn.std()), "equal": torch.equal(drawn, expected)}
    reward.save_hf(cases.folder / "rm", load_tokenizer(cases.model), {"mean": 1.0, "std": 2.0})
    if cases.rank == 0:
        batch = packed(ITEMS)
        again = load_sequence_regression(str(cases.folder / "rm"), options())
        with torch.no_grad():
            before = RewardModel(load_sequence_regression(cases.model, opts))(batch)
            after = RewardModel(again)(batch)
        cases.results["reward reload"] = float((before - after).abs().max())


def checkpoints(cases: Cases) -> None:
    """Stop after two steps and go on: the same bits as never stopping."""
    for stage in range(4):
        root = cases.folder / f"ckpt{stage}_{cases.ranks}"
        engine = cases.engine(zero_stage=stage)
        for _ in range(2):
            cases.step(engine)
        torch.manual_seed(123 + cases.rank)
        torch.rand(7)
        engine.save_checkpoint(root, "global_step2", {"consumed_samples": 12, "nested": {"a": [1]}})
        noise = torch.rand(3)
        straight = [cases.step(engine) for _ in range(2)]
        expected = cases.weights(engine)
        torch.manual_seed(0)
        other = cases.engine(zero_stage=stage)
        state = other.load_checkpoint(root)
        resumed_noise = torch.rand(3)
        resumed = [cases.step(other) for _ in range(2)]
        got = cases.weights(other)
        cases.results[f"checkpoint zero{stage}"] = {
            "state": state,
            "steps": other.step_count,
            "figures": straight == resumed,
            "weights": all(torch.equal(expected[n], got[n]) for n in expected),
            "noise": all_reduce_sum([float(torch.equal(noise, resumed_noise))])[0] == cases.ranks,
            "latest": files.latest_tag(root),
            "losses": [loss for loss, _ in straight],
            "norms": [stats.grad_norm for _, stats in straight],
        }
    root = cases.folder / f"rotate_{cases.ranks}"
    for number in range(1, 5):
        engine.save_checkpoint(root, f"global_step{number}", {}, 2)
    engine.save_checkpoint(root, "best_global_step4", {}, 2)
    if cases.rank == 0:
        cases.results["rotated"] = files.checkpoint_tags(root)
        cases.results["rotated latest"] = files.latest_tag(root)
        cases.results["leftovers"] = [p.name for p in root.glob(".*")]


def refused_checkpoints(cases: Cases) -> None:
    """Another stage, another number of ranks, nothing there: told before anything is read."""

    def message(root: Path, **changes: Any) -> str:
        try:
            cases.engine(**changes).load_checkpoint(root)
        except files.CheckpointError as error:
            return str(error)
        return "no error"

    cases.results["other stage"] = message(cases.folder / f"ckpt2_{cases.ranks}", zero_stage=1)
    cases.results["nothing there"] = message(cases.folder / "nothing")
    other = cases.folder / f"ckpt2_{3 - cases.ranks}"
    if other.exists():
        cases.results["other ranks"] = message(other)


def universal(cases: Cases) -> None:
    """A checkpoint of two ranks, converted by DeepSpeed's tool, goes on with one."""
    for stage in (2, 3):
        root = cases.folder / f"ckpt{stage}_2"
        if cases.ranks == 1 and (root / files.LATEST_UNIVERSAL).exists():
            engine = cases.engine(zero_stage=stage, use_ds_universal_ckpt=True)
            state = engine.load_checkpoint(root)
            figures = [cases.step(engine) for _ in range(2)]
            cases.results[f"universal zero{stage}"] = {
                "state": state,
                "losses": [loss for loss, _ in figures],
                "norms": [stats.grad_norm for _, stats in figures],
            }
            if stage == 3:  # one rank reads it as it was written, and so it goes on
                engine.save_checkpoint(cases.folder / "partitioned", "step", {})
                with raises(cases.results, "partitions of stage 3"):
                    cases.engine(zero_stage=3).load_checkpoint(cases.folder / "partitioned")


def changed_flags(cases: Cases) -> None:
    """A resume with another rate and a longer schedule follows the new flags."""
    opts = options()
    longer = SchedulerSpec("linear", 10, warmup_ratio=0.0)
    engine = TrainEngine(PolicyModel(load_causal_lm(cases.model, opts)), opts, OptimizerSpec(5e-3), longer)
    engine.load_checkpoint(cases.folder / f"ckpt2_{cases.ranks}")
    cases.results["rate after resume"] = cases.step(engine)[1].lr
    cases.results["decay after resume"] = engine._engine.optimizer.param_groups[0]["weight_decay"]


@contextmanager
def raises(results: dict[str, Any], key: str) -> Iterator[None]:
    try:
        yield
        results[key] = "no error"
    except (NonFiniteError, OutOfMemoryError, files.CheckpointError) as error:
        results[key] = str(error)


def poisoned(cases: Cases) -> None:
    """A NaN loss, and a NaN gradient under a finite loss, on the last rank: all ranks stop, weights stay."""

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
            cases.step(engine, lambda loss: loss * float("nan"))
        with raises(cases.results, f"nan gradient {key}"):
            cases.step(engine, NaNGradient.apply)
        after = cases.weights(engine)
        cases.results[f"weights after nan {key}"] = all(torch.equal(before[n], after[n]) for n in before)
        cases.step(engine)
        cases.results[f"goes on {key}"] = bool(
            torch.isfinite(torch.cat([t.flatten() for t in cases.weights(engine).values()])).all()
        )


def weights_out(cases: Cases) -> None:
    """Export, buckets, metadata and Hugging Face folders."""
    for stage in range(4):
        engine = cases.engine(cases.tied, zero_stage=stage)
        cases.step(engine)
        limit = 30_000
        buckets = list(engine.gathered_parameters(limit))
        meta = engine.parameter_meta()
        flat = [item for bucket in buckets for item in bucket]
        sizes = [sum(t.numel() * t.element_size() for _, t in bucket) for bucket in buckets]
        cases.results[f"export zero{stage}"] = {
            "meta": [(n, t.dtype, tuple(t.shape)) for n, t in flat] == meta,
            "buckets": len(buckets) > 1,
            "limit": all(size <= limit or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True)),
            "tied once": [n for n, _ in flat if n in ("lm_head.weight", "model.embed_tokens.weight")],
        }
        target = cases.folder / f"hf{stage}_{cases.ranks}"
        engine.save_hf(target, load_tokenizer(cases.tied))
        with torch.no_grad():
            inside = engine(packed(ITEMS)).logprobs
        if cases.rank == 0:
            stock = AutoModelForCausalLM.from_pretrained(target)
            with torch.no_grad():
                outside = reference_logprobs(stock, ITEMS)
            cases.results[f"reload zero{stage}"] = float((inside.double() - outside).abs().max())
            named = dict(stock.named_parameters())
            cases.results[f"names zero{stage}"] = sorted(named) == sorted(n for n, _ in flat) and all(
                torch.equal(named[n].detach(), t) for n, t in flat
            )
    engine = cases.engine(zero_stage=3, lora_rank=4)
    engine.save_hf(cases.folder / f"adapter_{cases.ranks}")
    if cases.rank == 0:
        from safetensors.torch import load_file

        saved = load_file(cases.folder / f"adapter_{cases.ranks}" / "adapter_model.safetensors")
        cases.results["adapter"] = bool(saved) and all(t.numel() > 0 for t in saved.values())


def broken_weights(cases: Cases) -> None:
    """A model with a NaN is never written; every rank hears of it."""
    engine = cases.engine(zero_stage=2)
    with torch.no_grad():
        next(iter(engine.hf_model.parameters())).fill_(float("nan"))
    try:
        engine.save_hf(cases.folder / "broken")
        cases.results["broken"] = "no error"
    except RuntimeError as error:
        cases.results["broken"] = str(error)
    cases.results["broken heard"] = all_reduce_sum([float(cases.results["broken"] != "no error")])[0]


def inference(cases: Cases) -> None:
    """Engines without an optimizer give the same log-probs."""
    batch = packed(ITEMS)
    with torch.no_grad():
        expected = PolicyModel(load_causal_lm(cases.model, options()))(batch).logprobs
        for stage in (0, 2, 3):
            for offload in (False, True):
                opts = options(zero_stage=stage)
                model = load_causal_lm(cases.model, opts, trainable=False)
                engine = TrainEngine(PolicyModel(model), opts, None, param_offload=offload)
                engine.offload_states()
                cases.results[f"asleep zero{stage} offload={offload}"] = _refusals(engine, batch)
                engine.reload_states()
                got = engine(batch).logprobs
                cases.results[f"inference zero{stage} offload={offload}"] = float((got - expected).abs().max())


def _refusals(engine: TrainEngine, batch: Any) -> int:
    """How many uses of the weights a sleeping engine refuses."""
    refused = 0
    for use in (lambda: engine(batch), lambda: next(engine.gathered_parameters()), lambda: engine.save_hf("unused")):
        try:
            use()
        except RuntimeError as error:
            refused += "call reload_states() first" in str(error)
    return refused


def moving_average(cases: Cases) -> None:
    """The average of what each step leaves, saved as Hugging Face folder; a resume goes on with it."""
    from safetensors.torch import load_file

    for stage in (0, 2, 3):
        opts = options(zero_stage=stage)

        def start(opts: Any = opts) -> TrainEngine:
            model = PolicyModel(load_causal_lm(cases.model, opts))
            return TrainEngine(model, opts, SPEC, SCHEDULE, average_decay=0.75)

        engine = start()
        expected = {name: tensor.double() for name, tensor in cases.weights(engine).items()}
        for number in range(3):
            cases.step(engine)
            now = cases.weights(engine)
            expected = {name: 0.75 * tensor + 0.25 * now[name].double() for name, tensor in expected.items()}
            if number == 1:
                root = cases.folder / f"average{stage}_{cases.ranks}"
                engine.save_checkpoint(root, "global_step2", {})
        resumed = start()
        resumed.load_checkpoint(root)
        cases.step(resumed)
        for name, one in (("whole", engine), ("resumed", resumed)):
            target = root / name
            one.save_hf(target)
            if cases.rank == 0:
                saved = load_file(target / "model.safetensors")
                gaps = [float((saved[n] - expected[n]).abs().max()) for n in saved]
                moved = max(float((saved[n] - now[n]).abs().max()) for n in saved)
                cases.results[f"average zero{stage} {name}"] = [max(gaps), moved]


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


def main() -> None:
    world = init_distributed(timeout_s=120)
    rank, ranks, folder = world.rank, world.size, Path(sys.argv[1])
    cases = Cases(rank, ranks, folder)
    for part in (
        equality,
        muon,
        quantized,
        states_away,
        zero3_loading,
        checkpoints,
        refused_checkpoints,
        universal,
        changed_flags,
        poisoned,
        weights_out,
        broken_weights,
        inference,
        moving_average,
        backoff,
    ):
        part(cases)
    if rank == 0:
        (folder / f"results_{ranks}.json").write_text(json.dumps(cases.results))
    shutdown()


if __name__ == "__main__":
    main()
