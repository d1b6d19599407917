"""Models on two ranks that share each packed row, against the same models on one rank; part of layout_cases.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, sequences  # noqa: E402

from openrlhf.batching import MicroBatch, pack  # noqa: E402
from openrlhf.models.attention import PackingError  # noqa: E402
from openrlhf.models.loading import load_causal_lm, load_sequence_regression  # noqa: E402
from openrlhf.models.logprobs import Backbone, PolicyModel, RewardModel, ValueModel  # noqa: E402
from openrlhf.models.sequence_parallel import sequence_ranks  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"heads": 4, "kv_heads": 2},
    "qwen3": {"heads": 6, "kv_heads": 1, "hidden": 48},
    "mistral": {"sliding_window": 3},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
CASES = [*(("policy", arch) for arch in ARCHITECTURES), ("value", "llama"), ("reward", "llama")]
# The middle of 23 tokens is in the second sequence, and of the second batch in the third; then stand-ins.
BATCHES = ([0, 1, 2, 3], [3, 2, 1], [2], [])
ITEMS = sequences((3, 9, 2, 9), seed=2)


def _loss(kind: str, model: Backbone, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Outputs, and a number that depends on each of them differently."""
    weights = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    if kind == "reward":
        scores = model(batch).scores
        return scores.detach(), (scores * weights[0, : len(scores)]).sum()
    if kind == "value":
        values = model(batch)
        return values.detach(), (values * weights[0]).sum()
    outputs = model(batch, temperature=0.7, entropy=True)
    assert outputs.entropy is not None
    loss = (outputs.logprobs * weights[0]).sum() + (outputs.entropy * weights[1]).sum()
    if outputs.aux_loss is not None:
        loss = loss + 10 * outputs.aux_loss
    return torch.stack([outputs.logprobs, outputs.entropy]).detach(), loss


def _gradient(model: nn.Module) -> Tensor:
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    model.zero_grad()
    return torch.cat(parts)


def _differences(kind: str, path: str, checkpointing: bool) -> list[list[float]]:
    """For each batch: largest difference of outputs and of the gradient, and the gradient's largest entry."""
    opts = options(gradient_checkpointing=checkpointing)
    build: Callable[[Any], Backbone]
    if kind == "policy":
        model, build = load_causal_lm(path, opts), lambda model: PolicyModel(model, aux_loss=True)
    else:
        model = load_sequence_regression(path, opts, init_head=True)
        build = ValueModel if kind == "value" else RewardModel
    alone, shared = build(model).train(), build(model).train()
    shared.ranks = sequence_ranks(2, alone.config)
    rows = []
    for members in BATCHES:
        batch = pack(ITEMS, {}, members)
        expected, loss = _loss(kind, alone, batch)
        loss.backward()
        gradient = _gradient(model)
        got, loss = _loss(kind, shared, batch)
        loss.backward()
        part = _gradient(model)
        dist.all_reduce(part)
        rows.append([float((d).abs().max()) for d in (got - expected, part - gradient, gradient)])
    return rows


def _refusals(path: str) -> dict[str, str]:
    config = load_causal_lm(path, options()).config  # type: ignore[union-attr]
    messages = {}

    def refused(name: str, size: int, **changes: Any) -> None:
        kept = {key: getattr(config, key) for key in changes}
        for key, value in changes.items():
            setattr(config, key, value)
        try:
            sequence_ranks(size, config)
        except PackingError as error:
            messages[name] = str(error)
        for key, value in kept.items():
            setattr(config, key, value)

    refused("heads", 3)
    refused("ranks", 4)
    refused("attention", 2, _attn_implementation="sdpa")
    refused("rotary", 2, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    return messages


def sequence_grid(folder: Path) -> dict[str, Any]:
    """``[kind][architecture]``: see :func:`_differences`; and the messages of what is refused."""
    paths = {arch: str(folder / f"divided_{arch}") for arch in ARCHITECTURES}
    if dist.get_rank() == 0:
        for arch, shape in ARCHITECTURES.items():
            make_tiny_model(paths[arch], arch, **shape)
    dist.barrier()
    results: dict[str, Any] = {"refusals": _refusals(paths["llama"])}
    for kind, arch in CASES:
        results.setdefault(kind, {})[arch] = _differences(kind, paths[arch], arch == "llama")
    return results
