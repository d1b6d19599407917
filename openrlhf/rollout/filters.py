"""Dynamic filtering: which groups carry a learning signal, and how many more prompts a step needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from openrlhf.rollout.buffer import RolloutBuffer
from openrlhf.rollout.episodes import Group, PromptItem
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.trajectory import Trajectory

# Rewards that differ by less than rounding are equal: normalising them would only amplify noise.
_RELATIVE_SPREAD = 1e-9


@dataclass(frozen=True)
class DynamicFilter:
    """Keeps a group whose mean score lies strictly between `low` and `high` and whose rewards differ.

    A group in which all rewards are equal gives every sample the advantage 0, whatever its mean (see DAPO,
    arXiv:2503.14476, section 3.2).
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"dynamic_filtering_reward_range: low {self.low} must be below high {self.high}")

    def judge(self, trajectories: Sequence[Trajectory]) -> str | None:
        """Returns why the group is to be dropped, or None to keep it.

        The reasons are "no_score", "too_few_samples", "mean_low", "mean_high" and "zero_spread".
        """
        scores = [t.score if t.score is not None else t.reward for t in trajectories]
        rewards = [t.reward if t.reward is not None else t.score for t in trajectories]
        if any(score is None for score in scores):
            return "no_score"
        if len(scores) < 2:
            return "too_few_samples"
        mean = float(np.mean(np.asarray(scores, dtype=np.float64)))
        if mean <= self.low:
            return "mean_low"
        if mean >= self.high:
            return "mean_high"
        values = np.asarray(rewards, dtype=np.float64)
        if values.max() - values.min() <= _RELATIVE_SPREAD * max(1.0, float(np.abs(values).max())):
            return "zero_spread"
        return None


@dataclass(frozen=True)
class CollectedGroups:
    """The groups of one step, in the order their prompts were drawn, and what it took to get them.

    Attributes:
        groups: at most the target number; fewer only where the data ran out, or, without a filter, where the
            limit on draws was reached because samples failed.
        seen: groups that finished, buffered ones not counted.
        kept: those of them that passed the filter.
        dropped: number of the others, by reason.
        exhausted: the data ran out.
        filtering: a filter was at work.
    """

    groups: tuple[Group, ...]
    seen: int
    kept: int
    dropped: dict[str, int] = field(default_factory=dict)
    exhausted: bool = False
    filtering: bool = False

    def metrics(self) -> dict[str, float]:
        """Counts by name; `dynamic_filtering_pass_rate` is kept groups / seen groups in percent."""
        metrics = {"rollout/groups_seen": float(self.seen), "rollout/groups_kept": float(self.kept)}
        metrics.update({f"rollout/filtered_{name}": float(number) for name, number in self.dropped.items()})
        if self.filtering and self.seen:
            metrics["dynamic_filtering_pass_rate"] = 100.0 * self.kept / self.seen
        return metrics


class GroupCollector:
    """Decides how many prompts to draw for one step, and which finished groups to keep.

    One more prompt is drawn for each dropped group, at once. The groups of a step are then those of the
    shortest run of prompts that holds enough good ones: they don't depend on the order of completion.

    Use: draw `wants()` prompts and call `drew`; call `add` for each finished group; repeat until `complete`;
    then `finish`.

    Args:
        target: groups that the step needs.
        group_filter: None keeps every group that has samples.
        buffer: groups left over from earlier steps are used first, and surplus ones are put here.
        first_draw: prompts drawn to begin with, if more than needed.
        max_rounds: how many times `target` prompts may be drawn before the step gives up.
    """

    def __init__(
        self,
        target: int,
        group_filter: DynamicFilter | None,
        buffer: RolloutBuffer,
        *,
        first_draw: int = 0,
        max_rounds: int = 10,
    ) -> None:
        if target < 1 or max_rounds < 1:
            raise ValueError(f"target {target} and max_rounds {max_rounds} must be at least 1")
        self._target = target
        self._filter = group_filter
        self._buffer = buffer
        self._first_draw = first_draw
        self._limit = max(target * max_rounds, first_draw)
        self._from_buffer = buffer.take(min(target, len(buffer)))
        self._kept: dict[int, Group] = {}
        self._order: dict[int, int] = {}
        self._seen = 0
        self._dropped: Counter[str] = Counter()
        self._exhausted = False

    @property
    def in_flight(self) -> int:
        """Prompts drawn whose groups have not come back."""
        return len(self._order) - self._seen

    @property
    def complete(self) -> bool:
        """Nothing is in flight, and nothing more can or need be drawn."""
        return self.in_flight == 0 and self.wants() == 0

    def wants(self) -> int:
        """Number of prompts to draw now."""
        if self._exhausted:
            return 0
        have = len(self._from_buffer) + len(self._kept) + self.in_flight
        need = self._target - have
        if not self._order and need > 0:
            need = max(need, self._first_draw - len(self._from_buffer))
        return max(0, min(need, self._limit - len(self._order)))

    def drew(self, items: Sequence[PromptItem], wanted: int) -> None:
        """Notes the prompts that were drawn; fewer than `wanted` means that the data has run out."""
        for item in items:
            if item.group_id in self._order:
                raise ValueError(f"group id {item.group_id} was drawn twice in one step")
            self._order[item.group_id] = len(self._order)
        self._exhausted = self._exhausted or len(items) < wanted

    def add(self, group: Group) -> bool:
        """Takes a finished group; returns whether it was kept."""
        if group.item.group_id not in self._order:
            raise ValueError(f"group id {group.item.group_id} was never drawn")
        self._seen += 1
        if not group.trajectories:
            reason: str | None = "no_samples"
        else:
            reason = None if self._filter is None else self._filter.judge(group.trajectories)
        if reason is not None:
            self._dropped[reason] += 1
            return False
        self._kept[group.item.group_id] = group
        return True

    def finish(self) -> CollectedGroups:
        """Returns the step's groups and puts surplus ones into the buffer.

        Raises:
            NoLearnableGroups: a filter left too few groups within the limit on draws, or nothing was kept.
        """
        drawn = sorted(self._kept.values(), key=lambda group: self._order[group.item.group_id])
        groups = [*self._from_buffer, *drawn]
        # Without a filter groups get lost by failures only; those failures have a policy and counts of their own.
        gave_up = self._filter is not None and not self._exhausted
        if len(groups) < self._target and (gave_up or (self._seen and not groups)):
            for group in groups:
                self._buffer.put(group)
            raise NoLearnableGroups(self._explain(len(groups)))
        for group in groups[self._target :]:
            self._buffer.put(group)
        return CollectedGroups(
            groups=tuple(groups[: self._target]),
            seen=self._seen,
            kept=len(self._kept),
            dropped=dict(sorted(self._dropped.items())),
            exhausted=self._exhausted,
            filtering=self._filter is not None,
        )

    def _explain(self, have: int) -> str:
        reasons = ", ".join(f"{name} {number}" for name, number in sorted(self._dropped.items())) or "none"
        stopped = "the data ran out" if self._exhausted else f"the limit of {self._limit} prompts was reached"
        bounds = ""
        if self._filter is not None:
            bounds = f" with a mean score strictly between {self._filter.low:g} and {self._filter.high:g}"
        return (
            f"no learnable groups: {have} of {self._target} groups{bounds} after {self._seen} were seen, "
            f"and {stopped} (kept {len(self._kept)}, seen {self._seen}; dropped: {reasons}). Use prompts "
            "that the model solves sometimes, widen --dynamic_filtering_reward_range, raise "
            "--n_samples_per_prompt, or check the reward."
        )


class PromptRefill:
    """An iterator that may have more after it said it had none: prompts are drawn as they become needed."""

    def __init__(self, collector: GroupCollector, draw: Callable[[int], Sequence[PromptItem]]) -> None:
        self._collector = collector
        self._draw = draw
        self._ready: list[PromptItem] = []

    def __iter__(self) -> Iterator[PromptItem]:
        return self

    def __next__(self) -> PromptItem:
        if not self._ready:
            wanted = self._collector.wants()
            if wanted:
                drawn = list(self._draw(wanted))
                self._collector.drew(drawn, wanted)
                self._ready = drawn[::-1]
        if not self._ready:
            raise StopIteration
        return self._ready.pop()
