"""What users' hooks see of a rollout: samples, and what a filter says about a group of them."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from openrlhf.rollout.rewards.base import as_number
from openrlhf.rollout.trajectory import Trajectory


class SampleStatus(enum.StrEnum):
    """How a sample ended. What is aborted is left out and counted."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    """One sample as hooks get it: a copy, free to change; only a generate function's changes come back.

    Attributes:
        index: position within its group; parts of one rollout share it.
        group_index: id of the group.
        prompt_id: number of the data row.
        prompt: prompt text, template applied.
        label: value of the label column.
        metadata: the row's other columns, with those of ``--metadata_key``, ``tools`` and ``datasource``.
        tokens: ids of the prompt, then of the response; before generation those of the prompt.
        response: text of the response, special tokens included.
        response_length: number of ids behind the prompt.
        loss_mask: for each of them 1 where the policy sampled it, else 0; None = all are sampled.
        rollout_log_probs: for each of them the sampling log-prob; None = what the engine recorded.
        reward: None while there is none.
        score: what dynamic filtering looks at; the reward if None.
        status: see `SampleStatus`; left at PENDING by a generate function, the engine's last answer decides.
        extra_logs: numbers to log, by name.
        weight_versions: versions of the weights that sampled it, oldest first.
    """

    Status: ClassVar = SampleStatus

    index: int = 0
    group_index: int = 0
    prompt_id: int = 0
    prompt: str = ""
    label: Any = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    reward: Any = None
    score: float | None = None
    status: SampleStatus = SampleStatus.PENDING
    extra_logs: dict[str, float] = field(default_factory=dict)
    weight_versions: list[int] = field(default_factory=list)

    def append(self, token_ids: Sequence[int], sampled: bool) -> None:
        """Adds ids behind the response.

        Args:
            token_ids: the ids; those that the policy sampled exactly as the engine gave them.
            sampled: the policy sampled them, so they are trained on.
        """
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        self.tokens = [*self.tokens, *token_ids]
        self.loss_mask = [*mask, *([int(sampled)] * len(token_ids))]
        self.response_length += len(token_ids)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Sample:
        """The sample of a finished trajectory."""
        t, start = trajectory, trajectory.prompt_length
        facts = copy.deepcopy(dict(t.metadata))
        aborted = SampleStatus.ABORTED if t.finish_reason == "abort" else SampleStatus.COMPLETED
        return cls(
            index=t.sample_index,
            group_index=t.group_id,
            prompt_id=t.prompt_id,
            prompt=str(facts.pop("prompt", "")),
            label=facts.pop("label", ""),
            response=str(facts.pop("response", "")),
            metadata=facts,
            tokens=t.token_ids.tolist(),
            response_length=t.total_length - start,
            loss_mask=t.action_mask[start:].astype(int).tolist(),
            rollout_log_probs=None if t.logprobs is None else t.logprobs[start:].tolist(),
            reward=t.reward,
            score=t.score,
            status=SampleStatus.TRUNCATED if t.truncated else aborted,
            extra_logs=dict(t.extra_logs),
            weight_versions=sorted(set(t.weight_version[t.action_mask].tolist())),
        )


@dataclass(frozen=True)
class DynamicFilterOutput:
    """What a dynamic-sampling filter may return in the place of a bool.

    Attributes:
        keep: train on the group.
        reason: why not, in a word; the metric ``rollout/filtered_<reason>`` counts it.
        keep_when_insufficient: use a dropped group all the same when the step would otherwise have too few.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def split_reward(value: Any, key: str) -> tuple[Any, Any, dict[str, Any]]:
    """Reward, score (None without one) and numbers to log of what a reward hook gives for one sample.

    Args:
        value: a number, or a dict with the reward under `key`, a score under "score", and anything else.
        key: ``--reward_key``.

    Raises:
        ValueError: the dict has no such key.
    """
    if not isinstance(value, Mapping):
        return value, None, {}
    if key not in value:
        raise ValueError(f"a dict without the key {key!r} (--reward_key; keys: {sorted(map(str, value))})")
    numbers = {str(k): as_number(v) for k, v in value.items() if k not in (key, "score")}
    logs = {name: number for name, number in numbers.items() if number is not None}
    return value[key], value.get("score"), logs
