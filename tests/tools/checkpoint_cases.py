"""Run by test_convert.py under torchrun: train a little, save checkpoints, resume from them.

``write FOLDER`` saves the cases, with the losses of the next steps, and resumes from what hf2resume made; ``resume
FOLDER NAME ...`` prints the losses after a resume from the universal format. One JSON object on standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from openrlhf import platform
from openrlhf.batching import pack
from openrlhf.models.loading import load_causal_lm, load_sequence_regression, load_tokenizer
from openrlhf.models.logprobs import PolicyModel, RewardModel, ScoreOutputs
from openrlhf.tools.loading import LoadSettings
from openrlhf.utils.process import leave
from openrlhf.workers.deepspeed_engine import OptimizerSpec, SchedulerSpec, TrainEngine
from openrlhf.workers.distributed import World, all_reduce_sum, init_distributed, shutdown

STEPS = 3


CASES: dict[str, dict[str, Any]] = {
    "zero0": {"zero_stage": 0},
    "zero2": {"zero_stage": 2, "model": "tied"},
    "zero3": {"zero_stage": 3},
    "zero3_bf16": {"zero_stage": 3, "param_dtype": "bf16"},
    "rm": {"zero_stage": 2, "model": "rm"},
}


def build(folder: Path, name: str, **changes: Any) -> TrainEngine:
    """The engine of a case."""
    case = {**CASES[name], **changes}
    model = case.pop("model", "plain")
    options = LoadSettings(packing_samples=True, **case)
    wrapped: nn.Module
    if model == "rm":
        loaded = load_sequence_regression(str(folder / "plain"), options, head_prefix="value_head", init_head=True)
        wrapped = RewardModel(loaded)
    else:
        wrapped = PolicyModel(load_causal_lm(str(folder / model), options))
    # Decay differs between the groups of weights, and the schedule between steps.
    optimizer = OptimizerSpec(1e-3, weight_decay=0.1)
    return TrainEngine(wrapped, options, optimizer, SchedulerSpec("cosine_with_min_lr", 10))


def step(engine: TrainEngine, world: World, seed: int) -> float:
    """One optimizer step on the same four rows for any number of ranks; the loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 60, (7 + i,), generator=generator) for i in range(4)]
    tokens = sum(len(row) - 1 for row in rows)
    outputs = engine(pack(rows, {}, range(world.rank, 4, world.size)))
    loss = outputs.scores.sum() / 4 if isinstance(outputs, ScoreOutputs) else -outputs.logprobs.sum() / tokens
    engine.backward(loss, last=True)
    engine.step()
    return all_reduce_sum([float(loss)])[0]


def main(mode: str, folder: Path, names: list[str]) -> dict[str, Any]:
    """Losses of each case after the third step."""
    world = init_distributed()
    losses = {}
    for name in names or list(CASES):
        root = folder / name
        engine = build(folder, name, use_ds_universal_ckpt=mode == "resume")
        if mode == "write":
            for seed in range(STEPS):
                step(engine, world, seed)
            engine.save_checkpoint(root, f"global_step{STEPS}", {"consumed_samples": 4 * STEPS})
            engine.save_hf(folder / f"{name}_hf", load_tokenizer(str(folder / "plain")))
        else:
            state = engine.load_checkpoint(root)
            assert state == {"consumed_samples": 4 * STEPS} and engine.step_count == STEPS
        losses[name] = [step(engine, world, seed) for seed in range(STEPS, 2 * STEPS)]
    if mode == "write":
        resumed = build(folder, "zero3_bf16", model="other", use_ds_universal_ckpt=True)
        assert resumed.load_checkpoint(folder / "from_hf") == {"consumed_samples": 0} and resumed.step_count == 0
        for name, engine in (("from_hf", resumed), ("started", build(folder, "zero3_bf16"))):
            losses[name] = [step(engine, world, seed) for seed in range(STEPS)]
    if world.is_first:
        print("RESULT" + json.dumps(losses), flush=True)
    dist.barrier()
    shutdown()
    return losses


if __name__ == "__main__":
    platform.prepare_process()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    leave(0)
