"""What the cases of the engine share: items, flags, engines and their steps, and a plain PyTorch loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, packed, sequences  # noqa: E402

from openrlhf.batching import pack  # noqa: E402
from openrlhf.models.loading import load_causal_lm  # noqa: E402
from openrlhf.models.logprobs import PolicyModel  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402
from openrlhf.workers import checkpoint_files as files  # noqa: E402
from openrlhf.workers.backoff import OutOfMemoryError  # noqa: E402
from openrlhf.workers.deepspeed_engine import (  # noqa: E402
    NonFiniteError,
    OptimizerSpec,
    SchedulerSpec,
    StepStats,
    TrainEngine,
)
from openrlhf.workers.distributed import DistributedError, all_reduce_sum  # noqa: E402
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


@contextmanager
def raises(results: dict[str, Any], key: str) -> Iterator[None]:
    try:
        yield
        results[key] = "no error"
    except (NonFiniteError, OutOfMemoryError, files.CheckpointError, DistributedError) as error:
        results[key] = str(error)
