"""Metrics of rollouts and evaluations, computed once over all samples: no means of means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openrlhf.rollout.trajectory import Trajectory

DEFAULT_SOURCE = "default"


def rollout_metrics(trajectories: Sequence[Trajectory], *, max_response_length: int | None = None) -> dict[str, float]:
    """Returns the metrics of one rollout; {} for none.

    Every sample has the same weight, however many turns or tokens it has; `group_reward_std` weighs groups
    equally and leaves out groups of one. Extra logs are averaged over the samples that have them. Rewards and
    scores that are not there yet (a reward model gives them later) are left out.

    Args:
        trajectories: all samples of the rollout.
        max_response_length: a response of that many tokens counts in `response_clip_ratio`; None = a
            truncated response does.
    """
    if not trajectories:
        return {}
    responses = np.array([t.response_length for t in trajectories], dtype=np.float64)
    truncated = np.array([t.truncated for t in trajectories], dtype=np.float64)
    clipped = truncated if max_response_length is None else (responses >= max_response_length).astype(np.float64)
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
    scored = [t for t in trajectories if t.score is not None]
    if scored:
        metrics["score"] = float(np.mean([t.score for t in scored]))
    rewarded = [t for t in trajectories if t.reward is not None]
    if rewarded:
        metrics.update(_reward_metrics(rewarded))
    metrics.update(_extra_log_means(trajectories))
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


def _extra_log_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.extra_logs.items():
            columns.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in columns.items()}


def eval_metrics(trajectories: Sequence[Trajectory], n: int) -> dict[str, float]:
    """Returns the metrics of an evaluation with `n` samples per prompt; {} for no samples.

    For each datasource: `eval_<source>_pass<n>` (mean over groups of the best reward), `eval_<source>_pass1`
    (mean over samples), `eval_<source>_response_length_mean` and `eval_<source>_truncated_rate`; and the last
    two and `eval_num_samples` over everything. They depend neither on the batch size nor on the order.

    Raises:
        ValueError: a sample has no reward.
    """
    if not trajectories:
        return {}
    for trajectory in trajectories:
        if trajectory.reward is None:
            raise ValueError(
                f"evaluation sample {trajectory.sample_index} of prompt {trajectory.prompt_id} has no reward"
            )
    metrics: dict[str, float] = {}
    for source, own in _by_source(trajectories).items():
        metrics[f"eval_{source}_pass{n}"] = float(np.mean([_rewards(group).max() for group in _groups(own)]))
        metrics[f"eval_{source}_pass1"] = float(_rewards(own).mean())
        metrics.update(_length_metrics(f"eval_{source}", own))
    metrics.update(_length_metrics("eval", trajectories))
    metrics["eval_num_samples"] = float(len(trajectories))
    return metrics


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
