"""Every advantage estimator with the KL penalty in the reward, in the loss and left out: two optimizer steps each.

Run on one rank by layout_cases.py; test_estimator_grid.py judges the results. The advantages are the estimator's own
(tests/algorithms holds those against float64); what the optimizer step makes of them is held against a plain
float64 computation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from objective_reference import ReferenceTrainer, policy_step, ppo_config, rollout, start_worker, token_logprobs

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.config import PPOConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.trainer.experience import (
    POLICY_COLUMNS,
    Experience,
    add_advantages,
    collect,
    optimizer_steps,
    step_batches,
)
from openrlhf.workers.model_worker import PolicyWorker
from openrlhf.workers.objectives import PolicyObjective

KL_COEF = 0.1
PLACES = ("reward", "loss", "none")


def estimator_experience(cfg: PPOConfig, reference: torch.nn.Module, estimator: str, place: str) -> Experience:
    """The rollout with log-probs near the model's, and the estimator's advantages."""
    groups = rollout()
    needs = ADVANTAGE_ESTIMATORS.get(estimator)
    greedy = [replace(group[0], reward=0.25) for group in groups] if needs.needs_baseline else []
    experience = collect(groups, greedy)
    noise = torch.Generator().manual_seed(3)

    def near(columns: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
        return [(c + scale * torch.randn(c.shape, generator=noise)).float() for c in columns]

    with torch.no_grad():
        ids = [torch.tensor(t.token_ids.tolist()) for t in experience.trajectories]
        own = [token_logprobs(reference, tokens, cfg.temperature)[0] for tokens in ids]
    experience.columns["old_logprobs"] = near(own, 0.15)
    if needs.needs_critic:
        experience.columns["old_values"] = near([torch.zeros_like(c) for c in own], 0.5)
    if place != "none":
        experience.columns["ref_logprobs"] = near(own, 0.3)
    add_advantages(experience, cfg, KL_COEF)
    return experience


def estimator_grid(folder: Path, model: str) -> dict[str, Any]:
    """``results[estimator][place]``: figures of the steps, those of the reference, and the advantages."""
    results: dict[str, Any] = {}
    base = ppo_config(folder, model, temperature=0.8, advantage_estimator="reinforce", packing_samples=True, pass_k=2)
    worker = start_worker(PolicyWorker, replace(base, actor_learning_rate=0.0))
    plain = replace(base, packing_samples=False, attn_implementation="eager")
    for estimator in ADVANTAGE_ESTIMATORS.names():
        results[estimator] = {}
        for place in PLACES:
            changes = {"advantage_estimator": estimator, "use_kl_loss": place == "loss", "kl_estimator": "k3"}
            cfg = replace(base, init_kl_coef=0.0 if place == "none" else KL_COEF, **changes)
            reference = ReferenceTrainer(load_causal_lm(model, plain), cfg, 0.0)
            experience = estimator_experience(cfg, reference.model, estimator, place)
            steps = optimizer_steps([t.group_id for t in experience.trajectories], cfg, seed=(cfg.seed, 0))
            coef = KL_COEF if place == "loss" else 0.0
            expected = [
                reference.step(lambda m, s=step, c=coef, g=cfg, e=experience: policy_step(m, g, e, s, kl_coef=c))
                for step in steps
            ]
            worker.cfg, worker.objective = cfg, PolicyObjective(cfg)
            batches = step_batches(experience, steps, dist.get_world_size(), cfg, POLICY_COLUMNS, coef)[0]
            got = [MetricSum.merged([worker.train([batch])]).values() for batch in batches]
            advantages = torch.cat(experience.columns["advantages"])
            results[estimator][place] = {
                "got": got,
                "expected": expected,
                "advantages": advantages.double().tolist(),
                "masked": float(advantages[~torch.cat(experience.action_masks)].abs().max()),
            }
    return results
