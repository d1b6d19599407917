"""Which prompts may be generated ahead of training, and which finished groups a step trains on. No threads, no Ray.

A *version* numbers the weights: version v is the policy after v steps, and step v trains on top of it. The queue never
starts more than the next ``queue_size`` steps can use, counted from the step that is training. A step takes the oldest
finished groups, and begins only when the steps after it will be in time for all others. So no token is ever trained on
more than ``queue_size`` versions after it was sampled, and nothing has to be thrown away. Groups that are too old all
the same (a run that goes on with a smaller queue) are dropped, counted, and their prompts generated again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.rollout.buffer import RolloutBuffer, Selection, group_version
from openrlhf.rollout.filters import CollectedGroups, DropLimit, GroupJudge, GroupTally
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.trainer.prompt_stream import PromptStream


class StalenessError(RuntimeError):
    """A group that is about to be trained on is older than the queue allows: a fault of the queue itself."""


@dataclass(frozen=True, kw_only=True)
class AsyncGroups(CollectedGroups):
    """The groups of a step, with the state of the queue they came from.

    Attributes:
        stale: groups dropped since the last step because they had become too old.
        waiting: finished groups that stay in the queue.
        in_flight: prompts that are being generated.
    """

    stale: int = 0
    waiting: int = 0
    in_flight: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts of all collected groups, and those of the queue."""
        own = {"stale_groups": self.stale, "groups_waiting": self.waiting, "groups_in_flight": self.in_flight}
        return {**super().metrics(), **{f"rollout/{name}": float(value) for name, value in own.items()}}


@dataclass(frozen=True)
class QueueLimits:
    """Sizes of a queue.

    Attributes:
        batch: groups of a step; the last step of an episode may have fewer.
        queue_size: steps that may be generated ahead, and so the largest staleness in versions.
        in_flight: prompts being generated at the same time.
        last_step: number of steps of the whole run, None for as many as the data gives.
        filter_rounds: how many times ``batch`` groups in a row a filter may drop before the run gives up.
        drained: nothing runs while weights change.
    """

    batch: int
    queue_size: int
    in_flight: int
    last_step: int | None = None
    filter_rounds: int = 10
    drained: bool = False

    @property
    def in_turn(self) -> bool:
        """Groups are started for a step when those of the step before it are there: every run has the same ones in it.

        Else the first step would take those of its own and the next one's groups that happen to finish first.
        """
        return self.drained and self.queue_size == 1


class RolloutQueue:
    """Groups on their way from generation to training. Every prompt is trained on once an episode.

    Use: :meth:`weights_changed` with the first version; then :meth:`next_prompt` whenever a prompt can be started,
    :meth:`finished` for each group that comes back, :meth:`take` when :attr:`ready`, and :meth:`hold` before and
    :meth:`weights_changed` after each weight update. Steps never mix episodes.

    Args:
        stream: hands out the prompts; gets back those of dropped groups.
        buffer: holds the finished groups.
        group_filter: None keeps every group that has samples.
        limits: sizes.
        select: which of the waiting groups a step takes; None = the oldest. What gets too old by that comes again.
    """

    def __init__(
        self,
        stream: PromptStream,
        buffer: RolloutBuffer,
        group_filter: GroupJudge | None,
        limits: QueueLimits,
        select: Selection | None = None,
    ) -> None:
        self._stream = stream
        self._buffer = buffer
        self._tally = GroupTally(group_filter)
        self._select = select
        self._insufficient = 0
        self._limits = limits
        self._in_flight: dict[int, PromptItem] = {}
        # Of every group that is not trained on yet: the version when its prompt was started.
        self._started = {group.item.group_id: group_version(group) for group in buffer.groups}
        self._version = 0
        self._training = False
        self._held = True
        self._stale = 0
        self._drops = DropLimit(limits.batch * limits.filter_rounds)

    @property
    def in_flight(self) -> list[PromptItem]:
        """Prompts that are being generated."""
        return list(self._in_flight.values())

    # --- generation ------------------------------------------------------------------------------------------------

    def next_prompt(self) -> PromptItem | None:
        """A prompt to start now, or None when enough are under way."""
        if not self._may_start():
            return None
        (item,) = self._stream.take(1)
        self._in_flight[item.group_id] = item
        self._started[item.group_id] = self._version
        return item

    def _may_start(self) -> bool:
        if self._held or len(self._in_flight) >= self._limits.in_flight or self._stream.remaining <= 0:
            return False
        episode, outstanding = self._stream.episode, self._outstanding()
        # A step that lacks prompts gets them whatever else there is: it would wait for ever.
        if episode == min([episode, *outstanding]) and outstanding[episode] < self._limits.batch:
            return self._steps_allowed() > 0
        return self._steps(outstanding + Counter([episode])) <= self._steps_allowed()

    def _outstanding(self) -> Counter[int]:
        """Groups by episode that are under way or finished, and not trained on yet."""
        waiting = [group.item for group in self._buffer.groups]
        return Counter(item.epoch for item in [*waiting, *self._in_flight.values()])

    @property
    def idle(self) -> bool:
        """Nothing is being generated, and nothing may be started."""
        return not self._in_flight and not self._may_start()

    def _steps(self, outstanding: Counter[int]) -> int:
        """Steps that it takes to train on these groups."""
        return sum(-(-count // self._limits.batch) for count in outstanding.values())

    def _steps_allowed(self) -> int:
        """Steps whose groups may exist besides those that are being trained on."""
        next_step = self._version + self._training
        allowed = self._version + self._limits.queue_size + 1 - next_step
        if self._limits.in_turn and not self.ready:
            allowed = 1
        return allowed if self._limits.last_step is None else min(allowed, self._limits.last_step - next_step)

    def finished(self, group: Group) -> None:
        """Takes a group whose samples are done.

        Raises:
            NoLearnableGroups: the filter has dropped too many in a row.
        """
        del self._in_flight[group.item.group_id]
        started = self._started.pop(group.item.group_id)
        reason = self._tally.judge(group)
        self._drops.add(reason)
        insufficient = self._drops.reached and group.verdict is not None and group.verdict.keep_when_insufficient
        if reason is None or insufficient:
            self._insufficient += insufficient
            self._started[group.item.group_id] = started
            self._buffer.put(group)
            return
        if self._drops.reached:
            raise self._drops.error(self._tally.last_loss)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was counted for the next step so far. Groups and prompts are in the states of buffer and stream."""
        return {"tally": self._tally.state_dict(), "insufficient": self._insufficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from `state_dict`."""
        self._tally.load_state_dict(state["tally"])
        self._insufficient = state["insufficient"]

    # --- training --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """:meth:`take` would give the groups of the next step, or none because all data is used up."""
        episode, wanted = self._next_step()
        if sum(group.item.epoch == episode for group in self._buffer.groups) < wanted:
            return False
        for later in range(self._limits.queue_size):
            # What runs and may be trained on in this step and the next `later` ones, and not after that. What waits
            # beside it has room in them: were it as old, this step would take nothing newer.
            last_started = self._version - self._limits.queue_size + later
            due = Counter(item.epoch for item in self.in_flight if self._started[item.group_id] <= last_started)
            if self._steps(due) > later:
                return False
        return True

    def _oldest(self, groups: Sequence[Group], episode: int) -> list[int]:
        """Indices of an episode's groups, the oldest weights first."""
        own = [index for index, group in enumerate(groups) if group.item.epoch == episode]
        ids = [group.item.group_id for group in groups]
        return sorted(own, key=lambda index: (self._started[ids[index]], ids[index]))

    def _next_step(self) -> tuple[int, int]:
        """Episode and number of groups of the next step."""
        outstanding = self._outstanding()
        episodes = [*outstanding, *([self._stream.episode] if self._stream.remaining > 0 else [])]
        if not episodes:
            return 0, 0
        episode = min(episodes)
        return episode, min(self._limits.batch, outstanding[episode] + self._stream.remaining_in(episode))

    def take(self) -> AsyncGroups:
        """The groups of the next step: the oldest of its episode; none when the data has run out.

        Raises:
            StalenessError: one is older than allowed.
            NoLearnableGroups: the data has run out, and none of it could be trained on.
        """
        episode, wanted = self._next_step()
        groups = self._buffer.take(wanted, lambda waiting, count: self._chosen(waiting, episode, count))
        for group in groups:
            del self._started[group.item.group_id]
        if not groups and self._tally.dropped and self._version == 0:
            raise self._tally.error("the data ran out")
        oldest = min((group_version(group) for group in groups), default=self._version)
        if self._version - oldest > self._limits.queue_size:
            raise StalenessError(
                f"step {self._version} would train on version {oldest}: more than {self._limits.queue_size} old"
            )
        self._training = True
        result = AsyncGroups(
            groups=tuple(groups),
            tally=self._tally,
            insufficient=self._insufficient,
            stale=self._stale,
            waiting=len(self._buffer),
            in_flight=len(self._in_flight),
        )
        self._stale = self._insufficient = 0
        self._tally = GroupTally(self._tally.filter)
        return result

    def _chosen(self, waiting: Sequence[Group], episode: int, count: int) -> list[int]:
        """Indices of the groups that a step takes, all of its episode."""
        own = self._oldest(waiting, episode)
        if self._select is None:
            return own[:count]
        return [own[index] for index in self._select([waiting[index] for index in own], count)]

    # --- weights ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Start no prompts until the weights have changed."""
        self._held = True

    def weights_changed(self, version: int) -> None:
        """The engines now have the weights of this version; what became too old is dropped, and comes again."""
        self._version = version
        self._held = self._training = False
        stale = self._buffer.drop_stale(version, self._limits.queue_size)
        self._stale += len(stale)
        for group in stale:
            del self._started[group.item.group_id]
        self._stream.give_back(group.item.group_id for group in stale)
