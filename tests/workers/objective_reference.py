"""The objectives of policy and critic in float64: one sequence at a time, action tokens only, plain transformers.

Shared by the tests that hold the training path (packing, micro-batches, ranks, DeepSpeed) against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openrlhf.config import PPOConfig, build
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.experience import Experience, loss_constant
from openrlhf.workers.model_worker import ModelWorker

Figures = dict[str, float]

# Group, prompt length, and the turns after it: "a" for sampled tokens, "e" for tokens of the environment.
SAMPLES: tuple[tuple[int, int, tuple[tuple[str, int], ...]], ...] = (
    (4, 3, (("a", 2), ("e", 4), ("a", 3))),
    (4, 3, (("a", 41),)),
    (4, 3, (("a", 1),)),
    (4, 3, (("a", 5), ("e", 2), ("a", 1), ("e", 3))),
    (7, 11, (("a", 9),)),
    (7, 11, (("e", 2),)),  # cut off before the policy said a word
    (7, 11, (("a", 3), ("e", 1), ("a", 12), ("e", 9), ("a", 2))),
    (9, 1, (("a", 1),)),
    (2, 6, (("a", 17), ("e", 5))),
    (2, 6, (("a", 4),)),
)
REWARDS = (1.0, -0.5, 0.25, 2.0, 0.0, 0.5, 1.5, -1.0, 0.75, -2.0)


def rollout(vocabulary: int = 80, step_rewards: bool = False, seed: int = 0) -> list[list[Trajectory]]:
    """Skewed lengths, multi-turn masks, groups of four, three, two and one sample, and one without any action."""
    generator = np.random.default_rng(seed)
    groups: dict[int, list[Trajectory]] = {}
    for (group, prompt, turns), reward in zip(SAMPLES, REWARDS, strict=True):
        members = groups.setdefault(group, [])
        mask = np.concatenate([np.zeros(prompt, bool), *(np.full(count, kind == "a") for kind, count in turns)])
        actions = np.flatnonzero(mask)
        steps = ((int(actions[0]), 0.3),) if step_rewards and len(actions) > 1 else ()
        members.append(
            Trajectory(
                prompt_id=100 + group,
                group_id=group,
                sample_index=len(members),
                token_ids=generator.integers(4, vocabulary, len(mask)),
                action_mask=mask,
                logprobs=None,
                weight_version=np.where(mask, 0, -1),
                reward=reward,
                score=reward,
                step_rewards=steps,
            )
        )
    return list(groups.values())


def ppo_config(folder: Path, model: str, **flags: Any) -> PPOConfig:
    """A validated configuration for one rank; a gradient shows in the weights, since Adam's epsilon is large."""
    data, reward = folder / "data.jsonl", folder / "reward.py"
    data.write_text('{"input": "1"}\n')
    reward.write_text("def reward_func(queries, prompts, labels): ...\n")
    values: dict[str, Any] = {
        "pretrain": model,
        "prompt_data": str(data),
        "remote_rm_url": str(reward),
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "train_batch_size": 8,
        "micro_train_batch_size": 2,
        "micro_rollout_batch_size": 2,
        "actor_num_gpus_per_node": 1,
        "max_new_tokens": 48,
        "max_len": 64,
        "param_dtype": "fp32",
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
        "actor_learning_rate": 0.05,
        "critic_learning_rate": 0.05,
        "adam_eps": 0.1,
        "l2": 0.1,
        "max_norm": 0.5,
    }
    result = build("train_ppo_ray", **(values | flags))
    assert isinstance(result, PPOConfig)
    return result


def start_worker(kind: type[ModelWorker], cfg: PPOConfig, rank: int = 0, total_steps: int = 10) -> Any:
    """A worker inside this process, which has a process group; what Ray would set up is left out."""
    worker = kind.__new__(kind)
    worker.role, worker.rank = kind.__name__, rank
    worker.load(cfg, total_steps)
    return worker


# --- models --------------------------------------------------------------------------------------------------------


def token_logprobs(model: nn.Module, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies ``[T]``; 0 for the first token."""
    table = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    first = table.new_zeros(1)
    entropy = -(table.exp() * table).sum(-1)
    return torch.cat([first, table.gather(1, ids[1:, None])[:, 0]]), torch.cat([first, entropy])


def token_values(model: Any, ids: Tensor) -> Tensor:
    """Values ``[T]`` of the states before the tokens; 0 for the first."""
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
    outputs = model.score(hidden)[:, 0]
    return torch.cat([outputs.new_zeros(1), outputs[:-1]])


# --- losses of one sequence's action tokens ------------------------------------------------------------------------


def _surrogate(ratio: Tensor, advantages: Tensor, cfg: PPOConfig) -> tuple[Tensor, Tensor]:
    low, high = cfg.eps_clip_low_high or (cfg.eps_clip, cfg.eps_clip)
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    objective = torch.minimum(unclipped, clipped)
    active = clipped < unclipped
    if cfg.dual_clip is not None:
        floor = cfg.dual_clip * advantages
        active = active | ((advantages < 0) & (objective < floor))
        objective = torch.where(advantages < 0, torch.maximum(objective, floor), objective)
    return -objective, active


def policy_tokens(cfg: PPOConfig, new: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each action token of one sequence, and whether a clip took effect."""
    low, high = cfg.eps_clip_low_high or (cfg.eps_clip, cfg.eps_clip)
    difference = new - old
    ratio = difference.exp()
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    if cfg.policy_loss_type == "ppo":
        return _surrogate(ratio, advantages, cfg)
    if cfg.policy_loss_type == "gspo":
        whole = difference.detach().mean().exp()
        return _surrogate(whole * (new - new.detach()).exp(), advantages, cfg)
    if cfg.policy_loss_type == "cispo":
        return -ratio.detach().clamp(1 - low, 1 + high) * advantages * new, outside
    if cfg.policy_loss_type == "gmpo":
        bounded = difference.clamp(-low, high)
        chosen = torch.where(
            advantages > 0,
            torch.minimum(difference, bounded),
            torch.where(advantages < 0, torch.maximum(difference, bounded), difference),
        )
        return -chosen.mean().exp() * advantages, chosen != difference
    if cfg.policy_loss_type == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05).to(new)
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, outside
    raise KeyError(cfg.policy_loss_type)


def kl_tokens(new: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Each token's estimate of the KL to the reference."""
    d = new - ref
    return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]


# --- an optimizer step ---------------------------------------------------------------------------------------------


class _Sums:
    """Mean of per-token figures over a step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, **columns: Tensor) -> None:
        for name, column in columns.items():
            self.parts.setdefault(name, []).append(column.detach().double())

    def means(self) -> Figures:
        return {name: float(torch.cat(parts).mean()) for name, parts in self.parts.items()}


def _mean(parts: Sequence[Tensor], mode: str, constant: float) -> Tensor:
    """Aggregation over the sequences that have action tokens."""
    if mode == "token-mean":
        return torch.cat(list(parts)).mean()
    per_sequence = [p.mean() if mode == "seq-mean-token-mean" else p.sum() / constant for p in parts]
    return torch.stack(per_sequence).mean()


def policy_step(
    model: nn.Module, cfg: PPOConfig, experience: Experience, members: Sequence[int], kl_coef: float
) -> tuple[Tensor, Figures]:
    """Loss of one optimizer step over the samples ``members``, and its metrics."""
    sums = _Sums()
    losses: list[Tensor] = []
    penalties: list[Tensor] = []
    entropies: list[Tensor] = []
    for i in members:
        mask = experience.action_masks[i]
        if not mask.any():
            continue
        columns = {name: column[i][mask].double() for name, column in experience.columns.items()}
        every, spread = token_logprobs(model, _ids(experience, i), cfg.temperature)
        new = every[mask]
        old = columns.get("old_logprobs", new.detach())
        loss, clipped = policy_tokens(cfg, new, old, columns["advantages"])
        if cfg.enable_vllm_is_correction:
            assert cfg.vllm_is_correction_type == "tis"
            rho = (old - columns["rollout_logprobs"]).exp()
            weight = rho.clamp(*cfg.vllm_is_truncated_threshold)
            if cfg.policy_loss_type == "gspo":  # takes its ratio against the rollout's log-probs instead
                loss, clipped = policy_tokens(cfg, new, columns["rollout_logprobs"], columns["advantages"])
            else:
                loss = loss * weight
                sums.add(is_clip_ratio=weight != rho, is_filter_ratio=torch.zeros_like(rho))
            sums.add(is_ratio=rho, is_ratio_sq=rho**2, vllm_kl=-rho.log())
        losses.append(loss)
        sums.add(ppo_clip_ratio=clipped, ppo_kl=old - new)
        if "rollout_logprobs" in columns:
            sums.add(logprobs_diff=(old - columns["rollout_logprobs"]).abs())
        if "ref_logprobs" in columns:
            penalties.append(kl_tokens(new, columns["ref_logprobs"], cfg.kl_estimator))
            sums.add(kl=penalties[-1])
        if cfg.entropy_loss_coef is not None:
            entropies.append(spread[mask])
            sums.add(entropy_loss=spread[mask])
    sequence_mode = cfg.policy_loss_type in ("gspo", "gmpo")
    mode = "seq-mean-token-mean" if sequence_mode else cfg.loss_agg_mode
    constant = loss_constant(cfg)
    policy = _mean(losses, mode, constant)
    total = policy
    if penalties and kl_coef:
        total = total + kl_coef * _mean(penalties, mode, constant)
    if entropies and cfg.entropy_loss_coef:
        total = total - cfg.entropy_loss_coef * _mean(entropies, mode, constant)
    return total, {"policy_loss": float(policy.detach()), **sums.means()}


def value_step(
    model: nn.Module, cfg: PPOConfig, experience: Experience, members: Sequence[int]
) -> tuple[Tensor, Figures]:
    """Value loss of one optimizer step, and its metrics."""
    sums = _Sums()
    losses = []
    for i in members:
        mask = experience.action_masks[i]
        new = token_values(model, _ids(experience, i))[mask]
        old, target = (experience.columns[name][i][mask].double() for name in ("old_values", "returns"))
        bounded = old + (new - old).clamp(-cfg.value_clip, cfg.value_clip)
        losses.append(0.5 * torch.maximum((new - target) ** 2, (bounded - target) ** 2))
        sums.add(values=new, value_clip_ratio=(new - old).abs() > cfg.value_clip)
    loss = torch.cat(losses).mean()
    return loss, {"critic_loss": float(loss.detach()), **sums.means()}


def _ids(experience: Experience, index: int) -> Tensor:
    return torch.from_numpy(np.array(experience.trajectories[index].token_ids)).long()


class ReferenceTrainer:
    """AdamW on a float64 model; ``lr`` 0 leaves the weights alone."""

    def __init__(self, model: nn.Module, cfg: PPOConfig, lr: float) -> None:
        self.model = model.double().requires_grad_(True)
        self.max_norm = cfg.max_norm
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": cfg.l2}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=cfg.adam_betas, eps=cfg.adam_eps)

    def step(self, objective: Callable[[nn.Module], tuple[Tensor, Figures]]) -> Figures:
        """One update; the total loss, the gradient's norm before clipping, and the objective's metrics."""
        loss, metrics = objective(self.model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), **metrics}
