"""What enters and leaves the engine, part of engine_cases.py: loading, checkpoints, exports, sleeping models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_base import ITEMS, SCHEDULE, SPEC, Cases, raises
from model_cases import options, packed, reference_logprobs
from transformers import AutoModelForCausalLM

from openrlhf.models.fused import fuse_elementwise
from openrlhf.models.loading import load_causal_lm, load_sequence_regression, load_tokenizer
from openrlhf.models.logprobs import PolicyModel, RewardModel
from openrlhf.workers import checkpoint_files as files
from openrlhf.workers import deepspeed_engine, frozen
from openrlhf.workers.deepspeed_engine import OptimizerSpec, SchedulerSpec, TrainEngine
from openrlhf.workers.distributed import all_reduce_sum
from openrlhf.workers.frozen import packed_copies
from openrlhf.workers.offload import offload_engine


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
            before = RewardModel(load_sequence_regression(cases.model, opts))(batch).scores
            after = RewardModel(again)(batch).scores
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
    """A model with a NaN is never written; every rank hears of it, and of a disk without room."""
    engine = cases.engine(zero_stage=2)
    root = cases.folder / f"no_room_{cases.ranks}"

    def full(*args: Any, **options: Any) -> None:
        raise RuntimeError("unexpected pos 307520 vs 307408")

    if cases.rank == cases.ranks - 1:  # the other rank is in DeepSpeed's next collective meanwhile
        engine._engine.checkpoint_engine.save = full
    blocker = cases.folder / f"a_file_{cases.ranks}"
    blocker.touch()
    with torch.no_grad():
        broken = cases.engine(zero_stage=2)
        next(iter(broken.hf_model.parameters())).fill_(float("nan"))
    with raises(cases.results, "broken"):
        broken.save_hf(cases.folder / "broken")
    with raises(cases.results, "no room"):
        engine.save_checkpoint(root, "global_step1", {})
    cases.results["no room left"] = files.checkpoint_tags(root)
    with raises(cases.results, "no folder"):
        engine.save_hf(blocker / "model")
    heard = sum(cases.results[name] != "no error" for name in ("broken", "no room", "no folder"))
    cases.results["broken heard"] = all_reduce_sum([heard])[0]


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


def frozen_parts(cases: Cases) -> None:
    """What a frozen model leaves on the device under ZeRO-3 while it is away, and whether it is the same afterwards.

    Nothing leaves a CPU, so another device is made up, and memory that is not pinned stands for such.
    """
    opts = options(zero_stage=3)
    engine = TrainEngine(PolicyModel(load_causal_lm(cases.model, opts, trainable=False)), opts, None)
    if engine._engine is None:  # one rank alone has nothing to partition
        return
    batch = packed(ITEMS)
    with torch.no_grad():
        expected = engine(batch).logprobs
    parts = [p.ds_tensor for p in engine.module.parameters()]
    before = [part.data_ptr() for part in parts]
    assert engine._frozen is not None
    with (
        mock.patch.object(deepspeed_engine, "on_gpu", lambda: True),
        mock.patch.object(engine._frozen, "_device", torch.device("meta")),
        mock.patch.object(frozen, "packed_copies", lambda tensors, pin_memory: packed_copies(tensors, False)),
    ):
        engine.offload_states()
    cases.results["frozen parts moved"] = sum(part.data_ptr() != old for part, old in zip(parts, before, strict=True))
    cases.results["frozen parts"] = len(parts)
    cases.results["frozen whole"] = sum(p.numel() for p in engine.module.parameters())
    engine.reload_states()
    with torch.no_grad():
        cases.results["frozen same"] = torch.equal(engine(batch).logprobs, expected)


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


def second_copies(cases: Cases) -> None:
    """With --zpg: steps with the states away in between, and how many weights have a copy before and after they leave.

    Of models that are partitioned while they are read there are two, as a policy comes after its reference. Must be the
    last: DeepSpeed gives such copies to all later engines of a process. The first model is not trained.
    """
    if cases.ranks == 1:
        return
    opts, batch = options(zero_stage=3, zpg=2), packed(ITEMS)
    with torch.no_grad():
        expected = PolicyModel(load_causal_lm(cases.model, options()))(batch).logprobs
        frozen = TrainEngine(PolicyModel(load_causal_lm(cases.model, opts, trainable=False)), opts, None)
        cases.results["zpg inference"] = float((frozen(batch).logprobs - expected).abs().max())
    for number, early in enumerate((False, True, True)):
        engine = cases.engine(zero_stage=3, zpg=2, zero3_init=early)
        weights: list[Any] = list(engine.module.parameters())
        figures, copies = [], []
        for _ in range(3):
            figures.append(cases.step(engine))
            cases.weights(engine)  # as a weight sync
            copies.append(sum(w.ds_secondary_tensor is not None for w in weights))
            offload_engine(engine._engine, engine._stage)
            copies.append(sum(w.ds_secondary_tensor is not None for w in weights))
            engine._engine.reload_states()
        cases.results[f"zpg {number}"] = [[loss, s.grad_norm, s.lr] for loss, s in figures]
        cases.results[f"zpg {number} copies"] = [copies, len(weights)]


PARTS = (
    zero3_loading,
    checkpoints,
    refused_checkpoints,
    universal,
    changed_flags,
    weights_out,
    broken_weights,
    inference,
    frozen_parts,
    moving_average,
    second_copies,
)
