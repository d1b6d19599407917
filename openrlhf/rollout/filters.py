"""Dynamic filtering: which groups carry a learning signal, and how many more prompts a step needs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from openrlhf.rollout.buffer import RolloutBuffer, Selection, oldest_first
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.group import Group, PromptItem

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

    def __str__(self) -> str:
        return f" with a mean score strictly between {self.low:g} and {self.high:g}"

    def judge(self, group: Group) -> str | None:
        """Returns why the group is to be dropped, or None to keep it.

        The reasons are "no_score", "too_few_samples", "mean_low", "mean_high" and "zero_spread".
        """
        scores = [t.score if t.score is not None else t.reward for t in group.trajectories]
        rewards = [t.reward if t.reward is not None else t.score for t in group.trajectories]
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
class CustomFilter:
    """Keeps what the user's function kept, which was asked where the group was made.

    Args:
        path: name of the function, for messages.
    """

    path: str

    def __str__(self) -> str:
        return f" that {self.path} keeps"

    def judge(self, group: Group) -> str | None:
        """Returns why the group is to be dropped, or None to keep it."""
        return None if group.verdict is None or group.verdict.keep else group.verdict.reason


GroupJudge = DynamicFilter | CustomFilter


class GroupTally:
    """Judges finished groups, and counts what became of them.

    Args:
        group_filter: None keeps every group that has samples.

    Attributes:
        seen: groups that finished.
        kept: those of them that passed the filter.
        dropped: number of the others, by reason.
        lost: samples that failed, by kind, of all groups seen.
        last_loss: why the last of them failed.
    """

    def __init__(self, group_filter: GroupJudge | None) -> None:
        self.filter = group_filter
        self.seen = 0
        self.kept = 0
        self.dropped: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.last_loss = ""

    def judge(self, group: Group) -> str | None:
        """Returns why the group is to be dropped, or None to keep it."""
        self.seen += 1
        self.lost.update(failure.kind for failure in group.failures)
        self.last_loss = group.failures[-1].message if group.failures else self.last_loss
        reason: str | None = "no_samples"
        if group.trajectories:
            reason = None if self.filter is None else self.filter.judge(group)
        if reason is None:
            self.kept += 1
        else:
            self.dropped[reason] += 1
        return reason

    def metrics(self) -> dict[str, float]:
        """Counts by name; `dynamic_filtering_pass_rate` is kept groups / seen groups in percent."""
        metrics = {"rollout/groups_seen": float(self.seen), "rollout/groups_kept": float(self.kept)}
        metrics.update({f"rollout/filtered_{name}": float(number) for name, number in self.dropped.items()})
        metrics.update({f"rollout/lost_{kind}": float(number) for kind, number in self.lost.items()})
        metrics["rollout/lost_samples"] = float(self.lost.total())
        if self.filter is not None and self.seen:
            metrics["dynamic_filtering_pass_rate"] = 100.0 * self.kept / self.seen
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The counts as plain data."""
        counts = {"seen": self.seen, "kept": self.kept, "last_loss": self.last_loss}
        return {**counts, "dropped": dict(self.dropped), "lost": dict(self.lost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from those of `state_dict`."""
        self.seen, self.kept, self.last_loss = state["seen"], state["kept"], state["last_loss"]
        self.dropped, self.lost = Counter(state["dropped"]), Counter(state["lost"])

    def error(self, why: str) -> NoLearnableGroups:
        """The error for a step that can't be filled."""
        return _no_learnable(why, self.kept, self.dropped, self.last_loss)


def _no_learnable(why: str, kept: int, dropped: Counter[str], last_loss: str) -> NoLearnableGroups:
    reasons = ", ".join(f"{name} {number}" for name, number in sorted(dropped.items())) or "none"
    lost = f" Of lost samples the last: {last_loss}." if last_loss else ""
    return NoLearnableGroups(
        f"no learnable groups: {why} (kept {kept}, seen {kept + dropped.total()}; dropped: {reasons}).{lost} Use "
        "prompts that the model solves sometimes, widen --dynamic_filtering_reward_range, raise "
        "--n_samples_per_prompt, or check the reward."
    )


class DropLimit:
    """Counts groups that are dropped one after another, over steps and episodes: a run must not go on like that.

    Args:
        groups: how many are too many.
    """

    def __init__(self, groups: int) -> None:
        self._limit = groups
        self._dropped: Counter[str] = Counter()

    def add(self, reason: str | None) -> None:
        """Count the next group, with why it was dropped; None ends the row, because it was kept."""
        if reason is None:
            self._dropped.clear()
        else:
            self._dropped[reason] += 1

    @property
    def reached(self) -> bool:
        """Whether there have been too many."""
        return self._dropped.total() >= self._limit

    def error(self, last_loss: str) -> NoLearnableGroups:
        """The error for a run that has reached the limit; ``last_loss`` is why the last lost sample failed."""
        why = f"the last {self._dropped.total()} were dropped one after another"
        return _no_learnable(why, 0, self._dropped, last_loss)


@dataclass(frozen=True)
class CollectedGroups:
    """The groups of one step, in the order their prompts were drawn, and what it took to get them.

    Attributes:
        groups: at most the target number; fewer only where the data ran out, or, without a filter, where the
            limit on draws was reached because samples failed.
        tally: counts of the groups that finished, buffered ones not among them.
        insufficient: dropped groups that were used all the same, because there were too few others.
    """

    groups: tuple[Group, ...]
    tally: GroupTally
    insufficient: int = 0

    def metrics(self) -> dict[str, float]:
        """Counts by name."""
        insufficient = {"rollout/groups_insufficient": float(self.insufficient)} if self.insufficient else {}
        return self.tally.metrics() | insufficient


class _Result(NamedTuple):
    """Why a finished group was dropped, if it was; and the group, if it can be used."""

    dropped: str | None
    group: Group | None


class GroupCollector:
    """Decides how many prompts to draw for one step, and which finished groups to keep.

    One more prompt is drawn for each dropped group, at once. The groups of a step are then those of the
    shortest run of prompts that holds enough good ones: they don't depend on the order of completion.

    Use: it iterates over the prompts to start; call `add` for each finished group; when there are no more prompts and
    all groups are finished, `finish`.

    Args:
        target: groups that the step needs.
        draw: gives so many prompts, or fewer where the data runs out.
        group_filter: None keeps every group that has samples.
        buffer: groups left over from earlier steps are used first, and surplus ones are put here.
        first_draw: prompts drawn to begin with, if more than needed.
        max_rounds: how many times `target` prompts may be drawn before the step gives up.
        select: which groups of the buffer are used.
        drops: goes on counting from step to step; None for no limit beyond that of this step.
    """

    def __init__(
        self,
        target: int,
        draw: Callable[[int], Sequence[PromptItem]],
        group_filter: GroupJudge | None,
        buffer: RolloutBuffer,
        *,
        first_draw: int = 0,
        max_rounds: int = 10,
        select: Selection = oldest_first,
        drops: DropLimit | None = None,
    ) -> None:
        self._target = target
        self._draw = draw
        self._drawn: deque[PromptItem] = deque()
        self._tally = GroupTally(group_filter)
        self._buffer = buffer
        self._first_draw = first_draw
        self._limit = max(target * max_rounds, first_draw)
        self._from_buffer = buffer.take(min(target, len(buffer)), select)
        # By group id, in the order in which prompts were drawn; None while a group is not finished.
        self._results: dict[int, _Result | None] = {}
        self._drops = drops
        self._exhausted = False

    def __iter__(self) -> Iterator[PromptItem]:
        return self

    def __next__(self) -> PromptItem:
        """A prompt to start now. There may be more after it said that there is none: drawn as they become needed."""
        wanted = 0 if self._drawn else self._wanted()
        if wanted:
            self._drawn.extend(self._draw(wanted))
            self._exhausted = len(self._drawn) < wanted
            for item in self._drawn:
                if item.group_id in self._results:
                    raise ValueError(f"group id {item.group_id} was drawn twice in one step")
                self._results[item.group_id] = None
        if not self._drawn:
            raise StopIteration
        return self._drawn.popleft()

    def _wanted(self) -> int:
        """Number of prompts to draw now."""
        if self._exhausted:
            return 0
        drawn = len(self._results)
        unfinished = drawn - self._tally.seen
        need = self._target - len(self._from_buffer) - self._tally.kept - unfinished
        if not drawn and need > 0:
            need = max(need, self._first_draw - len(self._from_buffer))
        return max(0, min(need, self._limit - drawn))

    def add(self, group: Group) -> bool:
        """Takes a finished group; returns whether it was kept."""
        if group.item.group_id not in self._results:
            raise ValueError(f"group id {group.item.group_id} was never drawn")
        reason = self._tally.judge(group)
        usable = reason is None or (group.verdict is not None and group.verdict.keep_when_insufficient)
        self._results[group.item.group_id] = _Result(reason, group if usable else None)
        return reason is None

    def finish(self, may_be_empty: bool = False) -> CollectedGroups:
        """Returns the step's groups and puts surplus ones into the buffer.

        Args:
            may_be_empty: where the data ran out, nothing need have been kept.

        Raises:
            NoLearnableGroups: a filter left too few groups within the limit on draws, nothing was kept, or nothing
                was for too long.
        """
        results = [result for result in self._results.values() if result is not None]
        kept = [result.group for result in results if result.group is not None and result.dropped is None]
        spare = [result.group for result in results if result.group is not None and result.dropped is not None]
        groups = [*self._from_buffer, *kept]
        reserve = spare[: max(0, self._target - len(groups))]
        groups.extend(reserve)
        # Without a filter groups get lost by failures only; those failures have a policy and counts of their own.
        gave_up = self._tally.filter is not None and not self._exhausted
        nothing = self._tally.seen > 0 and not groups and not (may_be_empty and self._exhausted)
        if len(groups) < self._target and (gave_up or nothing):
            for group in groups:
                self._buffer.put(group)
            stopped = "the data ran out" if self._exhausted else f"the limit of {self._limit} prompts was reached"
            raise self._tally.error(
                f"{len(groups)} of {self._target} groups{self._tally.filter or ''} after {self._tally.seen} were seen, "
                f"and {stopped}"
            )
        if self._drops is not None:
            for result in results:
                self._drops.add(result.dropped)
            if not groups and self._drops.reached:
                raise self._drops.error(self._tally.last_loss)
        for group in groups[self._target :]:
            self._buffer.put(group)
        return CollectedGroups(tuple(groups[: self._target]), self._tally, len(reserve))
