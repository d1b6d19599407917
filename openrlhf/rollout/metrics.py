"""Metrics of rollouts and evaluations, computed once over all samples: no means of means."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from openrlhf.rollout.agent_output import CUT_TOKENS
from openrlhf.rollout.errors import SampleError
from openrlhf.rollout.rewards.builtin import plain_answer
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.logging import get_logger, note_once

logger = get_logger(__name__)

DEFAULT_SOURCE = "default"


def rollout_metrics(
    trajectories: Sequence[Trajectory], *, max_new_tokens: int | None, max_len: int
) -> dict[str, float]:
    """Returns the metrics of one rollout; {} for none.

    Every sample has the same weight, however many turns or tokens it has; `group_reward_std` weighs groups
    equally and leaves out groups of one. Rewards and scores that are not there yet (a reward model gives them later)
    are left out. `rollout/cut_observations_rate` is there where an agent's text did not fit.

    Args:
        trajectories: all samples of the rollout.
        max_new_tokens, max_len: the length limits. `response_clip_ratio` counts what stands at one of them, also where
            it ended there by itself, and what a limit of an agent's own has cut.
    """
    if not trajectories:
        return {}
    responses = np.array([t.response_length for t in trajectories], dtype=np.float64)
    truncated = np.array([t.truncated for t in trajectories], dtype=np.float64)
    clipped = np.array([t.truncated or t.room(max_new_tokens, max_len) == 0 for t in trajectories], dtype=np.float64)
    metrics = {
        "response_length": float(responses.mean()),
        "total_length": float(np.mean([t.total_length for t in trajectories])),
        "truncated": float(truncated.mean()),
        "response_clip_ratio": float(clipped.mean()),
        "rollout/response_length_mean": float(responses.mean()),
        "rollout/response_length_max": float(responses.max()),
        "rollout/truncated_rate": float(truncated.mean()),
        "rollout/num_samples": float(len(trajectories)),
    }
    cut = sum(CUT_TOKENS in t.metadata for t in trajectories)
    if cut:
        metrics["rollout/cut_observations_rate"] = cut / len(trajectories)
    scored = [t for t in trajectories if t.score is not None]
    if scored:
        metrics["score"] = float(np.mean([t.score for t in scored]))
    rewarded = [t for t in trajectories if t.reward is not None]
    if rewarded:
        metrics.update(_reward_metrics(rewarded))
    return metrics


def _reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = _rewards(trajectories)
    metrics = {
        "reward": float(rewards.mean()),
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
    }
    spreads = [float(_rewards(group).std(ddof=1)) for group in _groups(trajectories) if len(group) > 1]
    if spreads:
        metrics["group_reward_std"] = float(np.mean(spreads))
    sources = _by_source(trajectories)
    if len(sources) > 1:
        metrics.update({f"reward/{name}": float(_rewards(own).mean()) for name, own in sources.items()})
    return metrics


def extra_log_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What rewards and agents want logged, averaged over the samples that have it as a finite number."""
    columns: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.extra_logs.items():
            if math.isfinite(value):
                columns.setdefault(name, []).append(value)
            else:
                told = f"the extra log {name!r} is NaN or infinite for some samples, which its mean leaves out"
                note_once(logger, told, logging.WARNING)
    return {name: float(np.mean(values)) for name, values in columns.items()}


def eval_metrics(trajectories: Sequence[Trajectory], n: int) -> dict[str, float]:
    """Returns the metrics of an evaluation with `n` samples per prompt; {} for no samples.

    For each datasource, under `eval_<source>_`: `pass<k>` for n and the powers of two below (see `best_of`),
    `mean<n>` over all samples with `mean<n>_ci95` (half of the 95 % interval: 1.96 standard errors of the prompts'
    means, since samples of one prompt are not independent; for two prompts and more), `maj<n>` (see
    `majority_reward`; for n > 1), `response_length_mean` and `truncated_rate`; and the last two and
    `eval_num_samples` over everything. They depend neither on the batch size nor on the order.

    Raises:
        SampleError: a sample has no reward.
        ValueError: a prompt has not `n` samples.
    """
    if not trajectories:
        return {}
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise SampleError(
                f"evaluation sample {trajectory.sample_index} of prompt {trajectory.prompt_id} has no reward: "
                "the agent or generate function gave none"
            )
    metrics: dict[str, float] = {}
    for source, own in _by_source(trajectories).items():
        prefix, groups = f"eval_{source}", _groups(own)
        for group in groups:
            if len(group) != n:
                raise ValueError(f"evaluation prompt {group[0].prompt_id} has {len(group)} samples, not {n}")
        for k in _pass_sizes(n):
            metrics[f"{prefix}_pass{k}"] = float(np.mean([best_of(_rewards(group), k) for group in groups]))
        means = np.array([_rewards(group).mean() for group in groups])
        metrics[f"{prefix}_mean{n}"] = float(means.mean())
        if len(groups) > 1:
            metrics[f"{prefix}_mean{n}_ci95"] = float(1.96 * means.std(ddof=1) / math.sqrt(len(groups)))
        if n > 1:
            metrics[f"{prefix}_maj{n}"] = float(np.mean([majority_reward(group) for group in groups]))
        metrics.update(_length_metrics(prefix, own))
    metrics.update(_length_metrics("eval", trajectories))
    metrics["eval_num_samples"] = float(len(trajectories))
    return metrics


def eval_metric_names(prompts: Mapping[str, int], n: int) -> list[str]:
    """The names that `eval_metrics` gives, by datasource and its number of prompts, with `n` samples of each."""
    names = ["eval_num_samples", "eval_response_length_mean", "eval_truncated_rate"]
    for source, count in prompts.items():
        parts = [*(f"pass{k}" for k in _pass_sizes(n)), f"mean{n}", "response_length_mean", "truncated_rate"]
        parts += [f"mean{n}_ci95"] * (count > 1) + [f"maj{n}"] * (n > 1)
        names += [f"eval_{source}_{part}" for part in parts]
    return sorted(names)


def _pass_sizes(n: int) -> list[int]:
    return sorted({n, *(2**power for power in range(n.bit_length()))})


def best_of(rewards: Sequence[float] | np.ndarray, k: int) -> float:
    """The best reward among `k` of the samples, averaged over all choices of `k`: unbiased, whatever their number.

    For rewards 0 and 1 with `c` right ones of `n` it is `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021,
    arXiv:2107.03374).
    """
    ordered = sorted(map(float, rewards))
    shares = [math.comb(rank, k - 1) / math.comb(len(ordered), k) for rank in range(len(ordered))]
    return math.fsum(share * reward for share, reward in zip(shares, ordered, strict=True))


def majority_reward(group: Sequence[Trajectory]) -> float:
    """The mean reward of the samples that give the most frequent answer; of tied answers, the mean.

    Answers are compared as numbers or as text without layout; see `plain_answer`.
    """
    votes: dict[object, list[Trajectory]] = {}
    for trajectory in group:
        votes.setdefault(plain_answer(str(trajectory.metadata.get("response", ""))), []).append(trajectory)
    most = max(map(len, votes.values()))
    return float(np.mean([_rewards(samples).mean() for samples in votes.values() if len(samples) == most]))


def _length_metrics(prefix: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        f"{prefix}_response_length_mean": float(np.mean([t.response_length for t in trajectories])),
        f"{prefix}_truncated_rate": float(np.mean([t.truncated for t in trajectories])),
    }


def _rewards(trajectories: Sequence[Trajectory]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([t.reward for t in trajectories], dtype=np.float64)


def _groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return list(groups.values())


def _by_source(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    sources: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        sources.setdefault(str(trajectory.metadata.get("datasource") or DEFAULT_SOURCE), []).append(trajectory)
    return dict(sorted(sources.items()))
