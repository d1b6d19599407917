"""Run by test_parallel_on_gpu.py on one or two GPUs: the same optimizer steps, figures of rank 0 as JSON.

Usage: parallel_cases.py <folder>, with the rank in the environment
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, packed, sequences  # noqa: E402

from openrlhf.models.loading import load_causal_lm  # noqa: E402
from openrlhf.models.logprobs import PolicyModel  # noqa: E402
from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine  # noqa: E402
from openrlhf.workers.distributed import init_distributed, shutdown  # noqa: E402

ITEMS = sequences((700, 33, 1, 512, 260))
STAGES = (0, 2, 3)
SHARED = {"sequence": {"ring_attn_size": 2}, "tensor": {"ds_tensor_parallel_size": 2}}
"""Layers last: DeepSpeed remembers for all later engines that ranks share them."""


def figures(folder: Path, **changes: Any) -> dict[str, Any]:
    """Log-probs before training; losses and gradient norms of three steps."""
    opts = options(param_dtype="bf16", gradient_checkpointing=True, **changes)
    engine = TrainEngine(PolicyModel(load_causal_lm(str(folder / "model"), opts)), opts, OptimizerSpec(1e-3))
    batch = packed(ITEMS).to(engine.device)
    with torch.no_grad():
        result: dict[str, Any] = {"logprobs": engine(batch).logprobs.tolist(), "losses": [], "norms": []}
    for _ in range(3):
        loss = -engine(batch).logprobs.sum() / batch.num_tokens / engine.data_parallel_size
        engine.backward(loss, last=True)
        result["losses"].append(float(loss.detach()) * engine.data_parallel_size)
        result["norms"].append(engine.step().grad_norm)
    return result


def main() -> None:
    world, folder = init_distributed(timeout_s=120), Path(sys.argv[1])
    cases = SHARED if world.size == 2 else {"alone": {}}
    results = {f"{name} {s}": figures(folder, zero_stage=s, **flags) for name, flags in cases.items() for s in STAGES}
    if world.is_first:
        (folder / f"figures_{world.size}.json").write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main()
