"""A prompt to roll out, and the group of finished samples that it becomes. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.sample import DynamicFilterOutput
from openrlhf.rollout.trajectory import Trajectory

EVAL_EPOCH = 1_000_000_007
"""Stands for "evaluation" in the seeds, so that they differ from those of any training episode."""


@dataclass(frozen=True)
class PromptItem:
    """One prompt to roll out.

    Attributes:
        prompt_id: number of its data row.
        group_id: id of the group that its samples form; unique among the groups trained together.
        text: the prompt as the model sees it (template applied).
        token_ids: ids of `text`.
        label: raw value of the label column.
        metadata: further columns, such as datasource.
        epoch: pass over the data, part of the seeds of its samples.
        greedy_baseline: besides the samples, one greedy response is wanted for its reward (ReMax).
        images: file paths, URLs or contents of image files, in the order of their placeholders.
        placed: the same once they are read and their tokens are among `token_ids`.
    """

    prompt_id: int
    group_id: int
    text: str
    token_ids: Sequence[int]
    label: Any = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    greedy_baseline: bool = False
    images: Sequence[str | bytes] = ()
    placed: tuple[PlacedImage, ...] = ()

    @property
    def evaluation(self) -> bool:
        """It is of the evaluation set."""
        return self.epoch == EVAL_EPOCH


@dataclass(frozen=True)
class EpisodeFailure:
    """A sample that was lost, and why.

    Attributes:
        kind: "agent", "timeout", "reward", "filter", "long_prompt" or "image".
    """

    prompt_id: int
    sample_index: int
    kind: str
    message: str


@dataclass(frozen=True)
class Group:
    """The finished samples of one prompt, in the order of their indices; lost ones are under `failures`.

    `baseline` is the greedy response if the prompt asks for one: rewarded, never trained on. `verdict` is that of the
    group filter, if there is one.
    """

    item: PromptItem
    trajectories: tuple[Trajectory, ...]
    failures: tuple[EpisodeFailure, ...] = ()
    baseline: Trajectory | None = None
    verdict: DynamicFilterOutput | None = None
