"""Run by test_layout_grid.py on one or two gloo ranks: every layout of the same optimizer steps, results as JSON.

Usage: layout_cases.py <folder>, with the rank in the environment
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from estimator_cases import estimator_grid  # noqa: E402
from objective_reference import (  # noqa: E402
    Figures,
    ReferenceTrainer,
    policy_step,
    ppo_config,
    rollout,
    start_worker,
    token_logprobs,
    token_values,
    value_step,
)
from sequence_cases import sequence_grid  # noqa: E402
from tensor_cases import tensor_grid  # noqa: E402

from openrlhf.algorithms.metrics import MetricSum  # noqa: E402
from openrlhf.config import PPOConfig  # noqa: E402
from openrlhf.config.derive import data_copies  # noqa: E402
from openrlhf.models.loading import load_causal_lm, load_sequence_regression  # noqa: E402
from openrlhf.trainer.experience import (  # noqa: E402
    POLICY_COLUMNS,
    VALUE_COLUMNS,
    Experience,
    add_advantages,
    collect,
    forward_batches,
    optimizer_steps,
    step_batches,
    token_outputs,
)
from openrlhf.utils.process import leave
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402
from openrlhf.workers.distributed import all_reduce_sum, init_distributed, shutdown  # noqa: E402
from openrlhf.workers.messages import CUTS, StepBatch  # noqa: E402
from openrlhf.workers.model_worker import CriticWorker, PolicyWorker  # noqa: E402
from openrlhf.workers.objectives import PolicyObjective  # noqa: E402

STAGES = (0, 2, 3)
LONGEST = 44
KL_COEF = 0.1


def _padded(size: int, **more: Any) -> dict[str, Any]:
    return {"packing_samples": False, "micro_train_batch_size": size, "micro_rollout_batch_size": size + 1, **more}


def _packed(size: int) -> dict[str, Any]:
    return {**_padded(size), "packing_samples": True}


def _dynamic(tokens: int) -> dict[str, Any]:
    caps = {"train_max_tokens_per_gpu": tokens, "rollout_max_tokens_per_gpu": tokens + 5}
    return {"packing_samples": True, "use_dynamic_batch": True, **caps}


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded 1": _padded(1),
    "padded 3": _padded(3),
    "padded all": _padded(16),
    "padded eager 2": _padded(2, attn_implementation="eager"),
    "packed 1": _packed(1),
    "packed 2": _packed(2),
    "packed all": _packed(16),
    f"dynamic {LONGEST}": _dynamic(LONGEST),
    "dynamic 70": _dynamic(70),
    "dynamic 4096": _dynamic(4096),
}
DIVIDED: dict[str, dict[str, Any]] = {
    "divided 1": {**_packed(1), "ring_attn_size": 2},
    "divided 3": {**_packed(3), "ring_attn_size": 2},
    "divided dynamic": {**_dynamic(35), "ring_attn_size": 2},
}
"""Two ranks share each packed row (sequence parallelism); the limit of tokens is one rank's."""
SPLIT: dict[str, dict[str, Any]] = {
    "split padded 2": {**_padded(2), "ds_tensor_parallel_size": 2},
    "split packed 3": {**_packed(3), "ds_tensor_parallel_size": 2},
}
"""Two ranks share each layer (tensor parallelism)."""
MOVED = ("padded 3", "packed 2", "dynamic 70", "divided dynamic", "split packed 3")
"""Layouts in which the weights are followed over the steps, too; elsewhere the learning rate is 0."""

OBJECTIVES: dict[str, dict[str, dict[str, Any]]] = {
    "policy": {
        "ppo": {
            "eps_clip_low_high": (0.1, 0.15),
            "entropy_loss_coef": 0.02,
            "kl_estimator": "k3",
            "enable_vllm_is_correction": True,
            "vllm_is_truncated_threshold": (0.9, 1.1),
        },
        "gspo": {"policy_loss_type": "gspo", "eps_clip": 0.05},
        "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm", "dual_clip": 1.1, "eps_clip": 0.1},
    },
    "value": {"value": {"value_clip": 0.1}},
}


class Recorder:
    """Adds up the losses that a worker hands to its engine."""

    loss = 0.0

    def _loss(self, batch: Any, step: StepBatch) -> tuple[Tensor, MetricSum]:
        loss, metrics = super()._loss(batch, step)  # type: ignore[misc]
        self.loss += float(loss.detach())
        return loss, metrics


class Policy(Recorder, PolicyWorker):
    pass


class Value(Recorder, CriticWorker):
    pass


@dataclass
class Role:
    """One of the two models, and what stands for it in the reference."""

    worker: type[Policy] | type[Value]
    objective: Callable[[PPOConfig], Any]
    columns: tuple[str, ...]
    load: Callable[[PPOConfig], nn.Module]
    outputs: Callable[[nn.Module, Tensor], Tensor]
    step: Callable[..., tuple[Tensor, Figures]]
    kl_coef: float


ROLES = {
    "policy": Role(
        Policy,
        PolicyObjective,
        POLICY_COLUMNS,
        lambda cfg: load_causal_lm(cfg.model_path, cfg),
        lambda model, ids: token_logprobs(model, ids, 0.8)[0],
        partial(policy_step, kl_coef=KL_COEF),
        KL_COEF,
    ),
    "value": Role(
        Value,
        lambda cfg: None,  # the value loss reads the configuration
        VALUE_COLUMNS,
        lambda cfg: load_sequence_regression(cfg.model_path, cfg, init_head=True),
        token_values,
        value_step,
        0.0,
    ),
}


class Grid:
    """All layouts of one role on this number of ranks."""

    def __init__(self, name: str, cfg: PPOConfig, rank: int, ranks: int) -> None:
        self.role, self.objectives = ROLES[name], OBJECTIVES[name]
        self.cfg, self.rank, self.ranks = cfg, rank, ranks
        self.plain_cfg = replace(cfg, packing_samples=False, attn_implementation="eager", zero_stage=0)
        self.experience, self.expected = self._experience()
        group_ids = [t.group_id for t in self.experience.trajectories]
        self.steps = optimizer_steps(group_ids, cfg, seed=(cfg.seed, 0))

    def _experience(self) -> tuple[Experience, list[Tensor]]:
        """The rollout with columns near the model's own outputs, and these outputs."""
        experience = collect(rollout(step_rewards=True))
        model = self.role.load(self.plain_cfg).double()
        with torch.no_grad():
            ids = [torch.tensor(t.token_ids.tolist()) for t in experience.trajectories]
            outputs = [self.role.outputs(model, tokens) for tokens in ids]
        noise = torch.Generator().manual_seed(3)

        def near(columns: list[Tensor], scale: float) -> list[Tensor]:
            return [(c + scale * torch.randn(c.shape, generator=noise)).float() for c in columns]

        if self.role.columns == VALUE_COLUMNS:
            experience.columns["old_values"] = near(outputs, 0.2)
        else:
            experience.columns["old_logprobs"] = near(outputs, 0.15)
            experience.columns["ref_logprobs"] = near(outputs, 0.3)
            experience.columns["rollout_logprobs"] = near(experience.columns["old_logprobs"], 0.1)
        add_advantages(experience, self.cfg, KL_COEF)
        return experience, outputs

    # --- reference -------------------------------------------------------------------------------------------------

    def reference(self, objective: str, lr: float) -> tuple[list[Figures], nn.Module]:
        cfg = replace(self.plain_cfg, **self.objectives[objective])
        trainer = ReferenceTrainer(self.role.load(cfg), cfg, lr)
        figures = [
            trainer.step(lambda model, s=step: self.role.step(model, cfg, self.experience, s)) for step in self.steps
        ]
        return figures, trainer.model

    # --- the package -----------------------------------------------------------------------------------------------

    def worker(self, cfg: PPOConfig, lr: float) -> Any:
        return start_worker(
            self.role.worker, replace(cfg, actor_learning_rate=lr, critic_learning_rate=lr), rank=self.rank
        )

    def use(self, worker: Any, cfg: PPOConfig) -> None:
        worker.cfg, worker.objective = cfg, self.role.objective(cfg)

    def train(self, worker: Any, cfg: PPOConfig) -> list[Figures]:
        """Figures of each optimizer step, the ranks together."""
        self.use(worker, cfg)
        copies = data_copies(cfg)
        batches = step_batches(
            self.experience, self.steps, self.ranks // copies, cfg, self.role.columns, kl_coef=self.role.kl_coef
        )[self.rank // copies]
        rows = []
        for step in batches:
            worker.loss = 0.0
            parts: list[Any] = [None] * self.ranks
            dist.all_gather_object(parts, worker.train([step]))
            values = MetricSum.merged(parts[::copies]).values()
            del values[f"{worker.prefix}_lr"]
            assert values.pop(CUTS) == 0
            values["grad_norm"] = values.pop(f"{worker.prefix}_grad_norm")
            rows.append({"loss": all_reduce_sum([worker.loss])[0] / copies, **values})
        return rows

    def forward_difference(self, worker: Any, cfg: PPOConfig) -> float:
        """Largest difference between the worker's outputs, back in order, and the reference's."""
        sequences = [t.token_ids for t in self.experience.trajectories]
        copies = data_copies(cfg)
        batches = forward_batches(sequences, self.ranks // copies, cfg)
        outputs: list[Any] = [None] * self.ranks
        dist.all_gather_object(outputs, worker.forward(batches[self.rank // copies]))
        columns = token_outputs(batches, outputs[::copies], len(sequences))
        return max(float((c - e).abs().max()) for c, e in zip(columns, self.expected, strict=True))

    def judged(self, stage: int) -> list[str]:
        """All objectives without ZeRO; a stage knows nothing of them, and gets the richest."""
        return list(self.objectives)[: None if stage == 0 else 1]

    def references(self) -> dict[str, Any]:
        moving = self.judged(3)[0]
        start = {n: p.detach().clone() for n, p in self.role.load(self.plain_cfg).double().named_parameters()}
        moved, model = self.reference(moving, 0.05)
        self.end = dict(model.named_parameters())
        self.path = max(float((self.end[n] - p).abs().max()) for n, p in start.items())
        return {
            "reference": {name: self.reference(name, 0.0)[0] for name in self.objectives},
            "moved reference": moved,
        }

    def run(self, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        moving = self.judged(3)[0]
        for stage in STAGES:
            workers: dict[tuple[bool, str, int], Any] = {}
            for name, changes in layouts.items():
                cfg = replace(self.cfg, zero_stage=stage, **changes)
                kind = (cfg.packing_samples, cfg.attn_implementation, cfg.ring_attn_size)
                worker = workers.get(kind) or workers.setdefault(kind, self.worker(cfg, 0.0))
                self.use(worker, cfg)
                entry: dict[str, Any] = {"forward": self.forward_difference(worker, cfg)}
                for objective in self.judged(stage):
                    entry[objective] = self.train(worker, replace(cfg, **self.objectives[objective]))
                results[f"zero{stage} {name}"] = entry
                if name in MOVED:
                    worker = self.worker(cfg, 0.05)
                    moved = self.train(worker, replace(cfg, **self.objectives[moving]))
                    weights = [pair for bucket in worker.engine.gathered_parameters() for pair in bucket]
                    gap = max(float((tensor - self.end[n]).abs().max()) for n, tensor in weights)
                    results[f"zero{stage} {name} moved"] = {
                        "steps": moved,
                        "weights": gap / self.path,
                        "count": len(weights),
                    }
        return results


def main() -> None:
    world = init_distributed(timeout_s=400)
    rank, ranks, folder = world.rank, world.size, Path(sys.argv[1])
    own = folder / f"{ranks}_{rank}"
    own.mkdir()
    model = str(folder / f"model_{ranks}")
    if rank == 0:
        make_tiny_model(model, "qwen2", hidden=32, heads=4, kv_heads=2)
    dist.barrier()
    flags = {"temperature": 0.8, "use_kl_loss": True, "kl_estimator": "k2"}
    results: dict[str, Any] = {}
    grids = {}
    for name, estimator in (("policy", "reinforce"), ("value", "gae")):
        cfg = ppo_config(own, model, advantage_estimator=estimator, **flags)
        grids[name] = Grid(name, cfg, rank, ranks)
        results[name] = grids[name].references() | grids[name].run(LAYOUTS | (DIVIDED if ranks == 2 else {}))
    results |= {"estimators": estimator_grid(own, model)} if ranks == 1 else {"divided": sequence_grid(folder)}
    if ranks == 2:  # last: DeepSpeed remembers for all later engines that ranks share layers
        for name, grid in grids.items():
            results[name] |= grid.run(SPLIT)
        results["split"] = tensor_grid(folder)
    if rank == 0:
        (folder / f"layouts_{ranks}.json").write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main()
    leave(0)
