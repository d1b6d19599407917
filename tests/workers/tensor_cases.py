"""An engine on two ranks that share its layers, against the model alone; part of layout_cases.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, packed, sequences  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from openrlhf.models.loading import load_causal_lm, load_sequence_regression  # noqa: E402
from openrlhf.models.logprobs import PolicyModel, RewardModel  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402
from openrlhf.workers.checkpoint_files import CheckpointError  # noqa: E402
from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine  # noqa: E402
from openrlhf.workers.tensor_parallel import LayerSplitError  # noqa: E402

BATCH = packed(sequences((3, 9, 2, 9), seed=2))
STAGES = (0, 2, 3)


def _engine(path: str, frozen: bool = False, zero3_init: bool | None = None, **flags: Any) -> TrainEngine:
    opts = options(ds_tensor_parallel_size=2, **flags)
    model = PolicyModel(load_causal_lm(path, opts, trainable=not frozen, zero3_init=zero3_init))
    return TrainEngine(model, opts, None if frozen else OptimizerSpec(1e-2), param_offload=frozen)


def _step(engine: TrainEngine) -> list[float]:
    loss = -engine(BATCH).logprobs.sum() / BATCH.num_tokens
    engine.backward(loss, last=True)
    return [float(loss.detach()), engine.step().grad_norm]


def _weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor for bucket in engine.gathered_parameters(5000) for name, tensor in bucket}


def _largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _resumed(path: str, folder: Path, stage: int) -> dict[str, Any]:
    """Two steps, a checkpoint, a third; and the third again after a resume."""
    engine = _engine(path, zero_stage=stage)
    steps = [_step(engine), _step(engine)]
    engine.save_checkpoint(folder / f"split{stage}", "two", {})
    steps.append(_step(engine))
    again = _engine(path, zero_stage=stage)
    again.load_checkpoint(folder / f"split{stage}")
    third = _step(again)
    engine.save_hf(folder / f"split_hf{stage}")
    dist.barrier()
    weights = _weights(engine)
    saved = load_file(folder / f"split_hf{stage}" / "model.safetensors")
    shapes = {name: list(shape) for name, _, shape in engine.parameter_meta()}
    return {
        "steps": steps,
        "again": third,
        "resumed": _largest(weights, _weights(again)),
        "saved": _largest(weights, saved),
        "shapes": shapes == {name: list(tensor.shape) for name, tensor in weights.items()},
    }


def _parted(path: str, stage: int) -> float:
    """Largest difference of the ranks' weights after a step in which their gradients were not quite the same.

    On a GPU the gradient of an embedding is summed in any order.
    """
    engine = _engine(path, zero_stage=stage)
    off = 0.01 * dist.get_rank()
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda gradient: gradient + off)
    for _ in range(2):
        _step(engine)
    weights = _weights(engine)
    first = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in first.values():
        dist.broadcast(tensor, 0)
    gap = torch.tensor(_largest(weights, first))
    dist.all_reduce(gap, op=dist.ReduceOp.MAX)
    return float(gap)


def _alone(path: str) -> list[list[float]]:
    """Three steps of the model on one rank, with plain torch."""
    model = PolicyModel(load_causal_lm(path, options())).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=OptimizerSpec.betas, weight_decay=0.0)
    rows = []
    for _ in range(3):
        loss = -model(BATCH).logprobs.sum() / BATCH.num_tokens
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append([float(loss.detach()), float(norm)])
    return rows


def _scores(path: str) -> float:
    """Largest difference of a trained reward model's scores."""
    opts = options(ds_tensor_parallel_size=2)
    model = load_sequence_regression(path, opts, init_head=True)
    plain = RewardModel(model)
    with torch.no_grad():
        expected = plain(BATCH).scores
        engine = TrainEngine(RewardModel(model), opts, OptimizerSpec(1e-2))
        return float((engine(BATCH).scores - expected).abs().max())


def _refusals(path: str, paths: dict[str, str], folder: Path) -> dict[str, str]:
    """Models that don't divide; and a checkpoint that another number of ranks shared."""
    messages = {}
    for name, other in paths.items():
        try:
            _engine(other)
        except LayerSplitError as error:
            messages[name] = str(error)
    meta = folder / "split2" / "two" / "meta.json"
    if dist.get_rank() == 0:
        meta.write_text(meta.read_text().replace('"tensor_parallel_size": 2', '"tensor_parallel_size": 4'))
    dist.barrier()
    try:
        _engine(path, zero_stage=2).load_checkpoint(folder / "split2")
    except CheckpointError as error:
        messages["checkpoint"] = str(error)
    return messages


def tensor_grid(folder: Path) -> dict[str, Any]:
    """Steps, checkpoints and exports by ZeRO stage; a frozen model; a reward model; and what is refused."""
    path = str(folder / "split")
    paths = {"heads": str(folder / "split_heads"), "plan": str(folder / "split_plan")}
    if dist.get_rank() == 0:
        make_tiny_model(path, "qwen3", heads=4, kv_heads=2, tie=True)
        make_tiny_model(paths["heads"], heads=4, kv_heads=1)
        make_tiny_model(paths["plan"], "gpt2", kv_heads=2, n_embd=64, n_layer=2, n_head=4)
    dist.barrier()
    frozen = _engine(path, frozen=True)
    with torch.no_grad():
        expected = PolicyModel(load_causal_lm(path, options()))(BATCH).logprobs
        difference = float((frozen(BATCH).logprobs - expected).abs().max())
    return {
        "alone": _alone(path),
        "stages": {stage: _resumed(path, folder, stage) for stage in STAGES},
        "parted": {stage: _parted(path, stage) for stage in STAGES},
        "partitioned while loaded": _step(_engine(path, zero3_init=True, zero_stage=3)),
        "frozen": difference,
        "scores": _scores(path),
        "refusals": _refusals(path, paths, folder),
    }
