"""From trajectories to optimizer steps: what the driver computes between rollout and training. No Ray here.

Per-token columns are lists with one float32 tensor ``[T_i]`` a trajectory, in the order of the trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.advantages import AdvantageSettings, RolloutColumns, compute_advantages
from openrlhf.algorithms.aggregation import step_denominators
from openrlhf.algorithms.kl import estimate_kl
from openrlhf.algorithms.shaping import apply_length_penalties
from openrlhf.batching.microbatch import MicroBatch, pack, unpack
from openrlhf.batching.plan import BatchPlan, plan_micro_batches, split_optimizer_steps
from openrlhf.config import PPOConfig
from openrlhf.config.derive import data_copies
from openrlhf.config.derive import optimizer_steps as planned_steps
from openrlhf.rollout.errors import SampleError
from openrlhf.rollout.metrics import rollout_metrics
from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.workers.messages import StepBatch

Column = list[Tensor]


@dataclass
class Experience:
    """A rollout on its way to training.

    Attributes:
        trajectories: all samples, groups complete, in order of group id and sample index.
        columns: per-token data by name.
        baselines: a greedy response for each group where the estimator compares with one: rewarded, not trained on.
    """

    trajectories: list[Trajectory]
    columns: dict[str, Column] = field(default_factory=dict)
    baselines: list[Trajectory] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [trajectory.total_length for trajectory in self.trajectories]

    @property
    def action_masks(self) -> Column:
        return [torch.from_numpy(np.array(t.action_mask)) for t in self.trajectories]

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def rewarded(self) -> list[Trajectory]:
        """All that get a reward: samples, then baselines."""
        return [*self.trajectories, *self.baselines]

    def with_scores(self, scores: np.ndarray) -> Experience:
        """The same with a reward model's scores ``[len(rewarded)]``; see :func:`with_model_scores`."""
        scored = with_model_scores(self.rewarded, scores)
        return Experience(scored[: len(self)], self.columns, scored[len(self) :])


def collect(groups: Sequence[Sequence[Trajectory]], baselines: Sequence[Trajectory] = ()) -> Experience:
    """Put groups that finished in any order into a fixed one, with the engine's log-probs as a column if there.

    Raises:
        SampleError: some trajectories have sampling log-probs and others do not.
    """
    ordered = sorted((t for group in groups for t in group), key=lambda t: (t.group_id, t.sample_index))
    experience = Experience(ordered, baselines=list(baselines))
    with_logprobs = [t for t in ordered if t.logprobs is not None]
    if with_logprobs and len(with_logprobs) < len(ordered):
        missing = next(t for t in ordered if t.logprobs is None)
        raise SampleError(
            f"{len(ordered) - len(with_logprobs)} of {len(ordered)} samples have no sampling log-probs, the first "
            f"of prompt {missing.prompt_id}; an agent must return rollout_log_probs for all of them or for none"
        )
    if with_logprobs:
        experience.columns["rollout_logprobs"] = [torch.from_numpy(np.array(t.logprobs)) for t in with_logprobs]
    return experience


# --- forward passes -----------------------------------------------------------------------------------------------


def forward_batches(
    sequences: Sequence[np.ndarray], ranks: int, cfg: PPOConfig, images: Sequence[Sequence[PlacedImage]] | None = None
) -> list[list[MicroBatch]]:
    """Micro-batches of a forward pass over all sequences, rank by rank.

    Args:
        sequences: token ids ``[T_i]``.
        ranks: data-parallel ranks of the model.
        cfg: ``micro_rollout_batch_size``, or with ``use_dynamic_batch`` the token budget.
        images: of each sequence.
    """
    lengths = [len(ids) for ids in sequences]
    tokens = cfg.rollout_max_tokens_per_gpu or cfg.train_max_tokens_per_gpu
    plan = _plan(lengths, ranks, cfg, cfg.micro_rollout_batch_size, tokens)
    return [[_packed(sequences, {}, images, indices) for indices in rank] for rank in plan]


def _packed(
    sequences: Sequence[np.ndarray],
    columns: Mapping[str, Column],
    images: Sequence[Sequence[PlacedImage]] | None,
    indices: Sequence[int],
) -> MicroBatch:
    """:func:`pack`, with the images of the sequences."""
    batch = pack(sequences, columns, indices)
    starts = batch.cu_seqlens.tolist()
    placed = zip(starts, (images[i] for i in indices), strict=False) if images else ()
    own = tuple((start + i.offset, i.length, i.data) for start, group in placed for i in group)
    return replace(batch, images=own) if own else batch


def _plan(lengths: Sequence[int], ranks: int, cfg: PPOConfig, samples: int, tokens: int) -> BatchPlan:
    """Micro-batches by number of tokens (``use_dynamic_batch``) or of samples."""
    if cfg.use_dynamic_batch:
        # Only a rollout can tell of a sequence beyond the budget: it has to be trained on all the same.
        return plan_micro_batches(lengths, ranks, max_tokens=tokens * data_copies(cfg), longer_alone=True)
    return plan_micro_batches(lengths, ranks, micro_batch_size=samples)


def token_outputs(
    batches: Sequence[Sequence[MicroBatch]], outputs: Sequence[Sequence[np.ndarray]], count: int
) -> Column:
    """Per-token outputs of all ranks, back in sequence order."""
    flat = [batch for rank in batches for batch in rank]
    tensors = [torch.from_numpy(np.array(output)) for rank in outputs for output in rank]
    return unpack(flat, tensors, count)


def sequence_outputs(
    batches: Sequence[Sequence[MicroBatch]], outputs: Sequence[Sequence[np.ndarray]], count: int
) -> np.ndarray:
    """Per-sequence outputs of all ranks, float64 ``[count]`` in sequence order."""
    result = np.full(count, np.nan)
    for batch, output in zip((b for rank in batches for b in rank), (o for rank in outputs for o in rank), strict=True):
        if not batch.is_dummy:
            result[batch.sequence_index.numpy()] = output
    return result


def with_model_scores(trajectories: Sequence[Trajectory], scores: np.ndarray) -> list[Trajectory]:
    """The same trajectories with a reward model's scores as reward and score.

    Raises:
        FloatingPointError: a score is NaN or infinite; names the prompts.
    """
    broken = [t.prompt_id for t, score in zip(trajectories, scores, strict=True) if not np.isfinite(score)]
    if broken:
        raise FloatingPointError(f"the reward model's score is not finite for prompts {broken[:10]}")
    return [replace(t, reward=float(score), score=float(score)) for t, score in zip(trajectories, scores, strict=True)]


def turn_limit(cfg: PPOConfig) -> int | None:
    """What cuts a response besides ``--max_len``; None for agents, whose trajectories know what limit a turn had."""
    return None if cfg.agent_func_path else cfg.max_new_tokens


def sample_metrics(trajectories: Sequence[Trajectory], cfg: PPOConfig) -> dict[str, float]:
    """Metrics of the samples, before anything is computed from them."""
    return rollout_metrics(trajectories, max_new_tokens=turn_limit(cfg), max_len=cfg.max_len)


# --- advantages ---------------------------------------------------------------------------------------------------


def shaped_rewards(trajectories: Sequence[Trajectory], cfg: PPOConfig) -> Tensor:
    """Terminal rewards ``[S]`` after the length penalties.

    Raises:
        SampleError: a trajectory has no reward; names prompt and sample.
    """
    missing = [t for t in trajectories if t.reward is None]
    if missing:
        raise SampleError(
            f"{len(missing)} samples have no reward, the first is sample {missing[0].sample_index} of prompt "
            f"{missing[0].prompt_id}: the agent or reward function gave none and there is no reward model"
        )
    return apply_length_penalties(
        torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
        torch.tensor([0 if t.truncated else t.room(turn_limit(cfg), cfg.max_len) for t in trajectories]),
        torch.tensor([t.truncated for t in trajectories]),
        overlong_buffer_len=cfg.overlong_buffer_len,
        overlong_penalty_factor=cfg.overlong_penalty_factor,
        stop_properly_penalty_coef=cfg.stop_properly_penalty_coef,
    )


def add_advantages(experience: Experience, cfg: PPOConfig, kl_coef: float) -> dict[str, float]:
    """Compute the columns ``advantages`` and ``returns``.

    Uses the columns ``old_logprobs`` and ``ref_logprobs`` when the KL penalty is in the reward, and ``old_values``
    with GAE.

    Returns:
        Metrics: the mean ``reward`` after length penalties, ``return`` (reward minus the KL penalties of the sequence),
        ``kl`` per action token if there is a reference model to compare with here, and the mean shaped reward of the
        greedy responses, if there are any.
    """
    mask = torch.cat(experience.action_masks)
    cu_seqlens = torch.tensor([0, *np.cumsum(experience.lengths)])
    columns = experience.columns
    kl = None
    if "ref_logprobs" in columns and "old_logprobs" in columns:
        kl = estimate_kl(torch.cat(columns["old_logprobs"]), torch.cat(columns["ref_logprobs"]), mask, cfg.kl_estimator)
    rewards = shaped_rewards(experience.trajectories, cfg)
    baselines = _baseline_rewards(experience, cfg)
    result = compute_advantages(
        cfg.advantage_estimator,
        RolloutColumns(
            rewards=rewards,
            group_ids=torch.tensor([t.group_id for t in experience.trajectories]),
            action_mask=mask,
            cu_seqlens=cu_seqlens,
            kl=kl,
            values=torch.cat(columns["old_values"]) if "old_values" in columns else None,
            step_rewards=_step_rewards(experience),
            baselines=baselines,
        ),
        AdvantageSettings(
            gamma=cfg.gamma,
            lambd=cfg.lambd,
            kl_coef=0.0 if kl is None or cfg.use_kl_loss else kl_coef,
            reward_clip_range=cfg.reward_clip_range,
            std_norm=not cfg.no_advantage_std_norm,
            pass_k=cfg.pass_k,
        ),
    )
    columns["advantages"] = list(result.advantages.split(experience.lengths))
    columns["returns"] = list(result.returns.split(experience.lengths))
    metrics = {"reward": float(rewards.mean()), "return": float(result.sequence_returns.mean())}
    if kl is not None:
        metrics["kl"] = float(kl.sum()) / max(int(mask.sum()), 1)
    if baselines is not None:
        metrics["rollout/greedy_reward_mean"] = float(baselines.mean())
    return metrics


def _baseline_rewards(experience: Experience, cfg: PPOConfig) -> Tensor | None:
    """Each sample's baseline, shaped like its own reward; None without greedy responses."""
    if not experience.baselines:
        return None
    shaped = shaped_rewards(experience.baselines, cfg).tolist()
    by_group = {t.group_id: value for t, value in zip(experience.baselines, shaped, strict=True)}
    return torch.tensor([by_group[t.group_id] for t in experience.trajectories], dtype=torch.float64)


def _step_rewards(experience: Experience) -> Tensor | None:
    """Rewards of single steps as a per-token column; None when no trajectory has any."""
    if not any(t.step_rewards for t in experience.trajectories):
        return None
    column = np.zeros(sum(experience.lengths), dtype=np.float32)
    start = 0
    for trajectory in experience.trajectories:
        for position, value in trajectory.step_rewards:
            column[start + position] += value
        start += trajectory.total_length
    return torch.from_numpy(column)


# --- optimizer steps ----------------------------------------------------------------------------------------------


def loss_constant(cfg: PPOConfig) -> float:
    """What seq-mean-token-sum-norm divides by: the tokens of a long response, the same number in the whole run."""
    return float(cfg.max_new_tokens or cfg.max_len)


POLICY_COLUMNS = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
VALUE_COLUMNS = ("returns", "old_values")


def optimizer_steps(group_ids: Sequence[int], cfg: PPOConfig, seed: Sequence[int]) -> list[list[int]]:
    """Which samples each optimizer step trains on, over all inner epochs.

    Groups are shuffled anew in every epoch by a generator of their own, so the order depends on nothing but the
    seed. The last step of an epoch may be smaller; nothing is dropped.
    """
    steps: list[list[int]] = []
    distinct = list(dict.fromkeys(group_ids))
    for epoch in range(cfg.max_epochs):
        generator = np.random.default_rng([*seed, epoch])
        rank = {distinct[place]: order for order, place in enumerate(generator.permutation(len(distinct)))}
        order = sorted(range(len(group_ids)), key=lambda i: rank[group_ids[i]])
        cut = split_optimizer_steps([group_ids[i] for i in order], cfg.train_batch_size)
        steps.extend([order[i] for i in step] for step in cut)
    return steps


def _refuse_not_finite(experience: Experience, columns: Mapping[str, Sequence[Tensor]]) -> None:
    """Before anything is trained on: once in a loss, the value could not be traced to its sample."""
    for name, column in columns.items():
        parts = zip(experience.trajectories, experience.action_masks, column, strict=True)
        # `c[m]` would be the plain way, and takes a hundred times as long.
        broken = [f"prompt {t.prompt_id} sample {t.sample_index}" for t, m, c in parts if not (c.isfinite() | ~m).all()]
        if broken:
            raise FloatingPointError(
                f"{name} is NaN or infinite at action tokens of {len(broken)} of {len(experience)} samples: "
                f"{', '.join(broken[:10])}. Nothing was updated. Look at these samples' rewards and at the model that "
                "this column comes from"
            )


def step_batches(
    experience: Experience,
    steps: Sequence[Sequence[int]],
    ranks: int,
    cfg: PPOConfig,
    columns: Sequence[str],
    kl_coef: float,
) -> list[list[StepBatch]]:
    """Pack the samples of every optimizer step for every rank.

    Args:
        experience: with all columns computed.
        steps: sample indices of each step.
        ranks: data-parallel ranks of the model that trains.
        cfg: micro-batch limits and the loss's constants.
        columns: names of the columns to send; those that were not computed are left out.
        kl_coef: current coefficient; 0 when the KL penalty is in the reward.

    Returns:
        ``result[rank][step]``.

    Raises:
        FloatingPointError: a column is NaN or infinite at an action token; names the samples.
    """
    sequences = [t.token_ids for t in experience.trajectories]
    masks, images = experience.action_masks, [t.images for t in experience.trajectories]
    sent = {name: experience.columns[name] for name in columns if name in experience.columns}
    _refuse_not_finite(experience, sent)
    data: Mapping[str, Column] = {"action_mask": masks, **sent}
    # The schedule was planned by prompts: a hook or a dump may have other numbers of samples for each.
    planned = planned_steps(cfg, len({t.group_id for t in experience.trajectories}))
    result: list[list[StepBatch]] = [[] for _ in range(ranks)]
    for indices in steps:
        plan = _plan(
            [len(sequences[i]) for i in indices], ranks, cfg, cfg.micro_train_batch_size, cfg.train_max_tokens_per_gpu
        )
        denominators = step_denominators([masks[i] for i in indices], constant=loss_constant(cfg))
        for rank, micro_batches in enumerate(plan):
            packed = tuple(_packed(sequences, data, images, [indices[i] for i in part]) for part in micro_batches)
            result[rank].append(StepBatch(packed, denominators, kl_coef, planned / len(steps)))
    return result
