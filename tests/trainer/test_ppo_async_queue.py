"""The queue between generation and training: bounded staleness, every prompt once an episode, no deadlock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from openrlhf.datasets.prompts import PromptRow
from openrlhf.rollout.buffer import RolloutBuffer, Selection, freshest_first
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.filters import CustomFilter, DynamicFilter
from openrlhf.rollout.group import EpisodeFailure, Group, PromptItem
from openrlhf.rollout.sample import DynamicFilterOutput
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.ppo_async_queue import QueueLimits, RolloutQueue, StalenessError
from openrlhf.trainer.prompt_stream import PromptStream


def rows(count: int) -> list[PromptRow]:
    return [PromptRow(i, f"prompt {i}", [i, i + 1], str(i), "default") for i in range(count)]


def group(item: PromptItem, *versions: int, rewards: Sequence[float] = (0.0, 1.0)) -> Group:
    """A finished group whose tokens were sampled by these versions, one after the other."""
    samples = tuple(
        Trajectory(
            prompt_id=item.prompt_id, group_id=item.group_id, sample_index=index,
            token_ids=np.arange(1 + len(versions)), action_mask=np.arange(1 + len(versions)) > 0, logprobs=None,
            weight_version=np.array([-1, *versions]), reward=reward, score=reward, finish_reason="stop",
        )
        for index, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(item, samples)


@dataclass
class Run:
    """A run in which everything happens in a random order; it fails when nothing can happen any more."""

    stream: PromptStream
    limits: QueueLimits
    drain: bool
    chance: random.Random
    unlearnable: frozenset[int] = frozenset()
    buffer: RolloutBuffer = field(default_factory=RolloutBuffer)
    first_version: int = 0
    select: Selection | None = None
    steps: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    stale: int = 0
    ahead: int = 0
    """Prompts that were started between the beginning and the end of a step."""

    def __post_init__(self) -> None:
        group_filter = DynamicFilter() if self.unlearnable else None
        self.queue = RolloutQueue(self.stream, self.buffer, group_filter, self.limits, self.select)
        self.version = self.first_version
        self.first_tokens: dict[int, int] = {}
        self.queue.weights_changed(self.version)

    def generate(self) -> bool:
        """Start or finish one prompt, or let one begin to sample; False when there is nothing to do."""
        started = self.queue.next_prompt()
        if started is not None:
            assert len(self.queue.in_flight) <= self.limits.in_flight
            if self.chance.random() < 0.5:
                self.first_tokens[started.group_id] = self.version
            return True
        running = self.queue.in_flight
        if not running:
            return False
        item = self.chance.choice(running)
        # A request may wait in the engine over a weight update before its first token.
        first = self.first_tokens.pop(item.group_id, self.version)
        rewards = (0.0, 0.0) if item.prompt_id in self.unlearnable else (0.0, 1.0)
        self.queue.finished(group(item, *range(first, self.version + 1), rewards=rewards))
        return True

    def step(self) -> bool:
        """One step of training; False when the data has run out."""
        while not self.queue.ready or self.chance.random() < 0.3:
            assert self.generate() or self.queue.ready, "deadlock"
            if self.queue.ready and self.chance.random() < 0.3:
                break
        taken = self.queue.take()
        self.stale += taken.stale
        if not taken.groups:
            assert self.stream.remaining == 0 and not self.queue.in_flight and len(self.buffer) == 0
            return False
        before = len(self.queue.in_flight)
        for _ in range(self.chance.randrange(2 * self.limits.batch)):
            self.generate()
        self.ahead += max(0, len(self.queue.in_flight) - before)
        while self.drain and not (self.queue.ready or self.queue.idle):
            assert self.generate(), "deadlock"
        self.queue.hold()
        while self.drain and self.queue.in_flight:
            assert self.queue.next_prompt() is None
            self.generate()
        self.steps.append([g.item.group_id for g in taken.groups])
        self.ages.extend(self.version - t.min_version for g in taken.groups for t in g.trajectories)
        self.version += 1
        self.queue.weights_changed(self.version)
        return True


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("queue_size", [1, 2, 4])
def test_any_order_of_events_trains_every_prompt_once_and_stays_within_the_bound(queue_size: int, drain: bool) -> None:
    oldest = 0
    for seed in range(60):
        chance = random.Random(seed)
        count, batch, episodes = chance.randint(1, 13), chance.randint(1, 5), chance.randint(1, 3)
        limits = QueueLimits(batch, queue_size, in_flight=chance.randint(1, 3 * batch), drained=drain)
        run = Run(PromptStream(rows(count), seed, episodes), limits, drain, chance)
        while run.step():
            pass
        assert sorted(g for step in run.steps for g in step) == list(range(count * episodes))
        assert len(run.steps) == episodes * -(-count // batch)  # as many as without --async_train
        assert all(len({g // count for g in step}) == 1 for step in run.steps)
        assert max(run.ages) <= queue_size and run.stale == 0
        oldest = max(oldest, *run.ages)
    assert oldest == queue_size  # the bound is reached: the next step is generated while this one trains


def test_whatever_a_buffer_filter_chooses_every_prompt_is_trained_on_once_within_the_bound() -> None:
    stale = 0
    for seed in range(60):
        chance = random.Random(seed)
        count, batch, queue_size = chance.randint(1, 30), chance.randint(1, 5), chance.randint(1, 4)

        def shuffled(groups: Sequence[Group], count: int, chance: random.Random = chance) -> list[int]:
            return chance.sample(range(len(groups)), count)

        limits = QueueLimits(batch, queue_size, in_flight=chance.randint(1, 3 * batch))
        select = freshest_first if seed % 2 else shuffled
        run = Run(PromptStream(rows(count), seed, 2), limits, seed % 4 < 2, chance, select=select)
        while run.step():
            assert len(run.steps) <= 2 * count
        assert sorted(g for step in run.steps for g in step) == list(range(2 * count))
        assert all(len({g // count for g in step}) == 1 for step in run.steps)
        assert max(run.ages) <= queue_size
        stale += run.stale
    assert stale > 0  # some were left waiting for too long, and came again


def test_with_a_queue_of_one_and_draining_every_step_has_the_same_groups_whatever_finishes_first() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        count, batch = chance.randint(1, 13), chance.randint(1, 5)
        unlearnable = frozenset(chance.sample(range(count), chance.randint(0, count // 2)))
        limits = QueueLimits(batch, 1, in_flight=chance.randint(1, 3 * batch), drained=True)
        steps, ages = [], []
        for order in range(5):
            run = Run(PromptStream(rows(count), seed, 2), limits, True, random.Random(order), unlearnable)
            while run.step():
                pass
            steps.append([sorted(step) for step in run.steps])
            ages.append(run.ages)
        assert steps == [steps[0]] * 5
        assert ages == [ages[0]] * 5


def test_the_next_groups_start_as_soon_as_those_of_the_step_are_there() -> None:
    """Also before the step begins: there may be an evaluation first."""
    queue = RolloutQueue(PromptStream(rows(30), 0, 1), RolloutBuffer(), None, QueueLimits(2, 1, 100, drained=True))
    queue.weights_changed(0)
    first = start(queue)
    assert len(first) == 2
    queue.finished(group(first[1], 0))
    assert start(queue) == []
    queue.finished(group(first[0], 0))
    second = start(queue)
    assert len(second) == 2
    for item in second:
        queue.finished(group(item, 0))
    assert [g.item for g in queue.take().groups] == first


def test_filtered_groups_are_replaced_and_counted() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        unlearnable = frozenset(chance.sample(range(12), 5))
        run = Run(PromptStream(rows(12), seed, 2), QueueLimits(3, 2, 4), seed % 2 == 0, chance, unlearnable)
        while run.step():
            pass
        trained = Counter(run.stream._item(g).prompt_id for step in run.steps for g in step)
        assert trained == {prompt: 2 for prompt in range(12) if prompt not in unlearnable}
        assert max(run.ages) <= 2 and run.stale == 0


def test_steps_are_limited_and_nothing_is_started_for_steps_that_will_not_come() -> None:
    run = Run(PromptStream(rows(20), 0, 1), QueueLimits(4, 3, 20, last_step=2), False, random.Random(0))
    assert run.step() and run.step()
    assert run.stream.consumed == 8 and not run.queue.in_flight and run.queue.next_prompt() is None


def start(queue: RolloutQueue) -> list[PromptItem]:
    items = []
    while (item := queue.next_prompt()) is not None:
        items.append(item)
    return items


def test_the_queue_size_says_how_far_generation_runs_ahead() -> None:
    queue = RolloutQueue(PromptStream(rows(30), 0, 1), RolloutBuffer(), None, QueueLimits(2, 2, 100))
    assert start(queue) == []  # no weights yet
    queue.weights_changed(0)
    first = start(queue)
    assert len(first) == 6  # this step's and two more
    for item in first[:2]:
        queue.finished(group(item, 0))
    assert queue.ready and [g.item for g in queue.take().groups] == first[:2]
    assert start(queue) == []  # two more are under way
    queue.hold()
    queue.weights_changed(1)
    second = start(queue)
    assert len(second) == 2


def test_a_step_of_groups_that_would_be_too_old_next_time_waits_for_no_newer_ones() -> None:
    queue = RolloutQueue(PromptStream(rows(30), 0, 1), RolloutBuffer(), None, QueueLimits(2, 1, 100))
    queue.weights_changed(0)
    first = start(queue)
    assert len(first) == 4
    for item in first:
        queue.finished(group(item, 0))
    queue.take()
    queue.weights_changed(1)
    assert len(start(queue)) == 2 and queue.ready  # first[2:], while the newer two run


def test_a_queue_is_idle_when_nothing_runs_and_nothing_may() -> None:
    queue = RolloutQueue(PromptStream(rows(4), 0, 1), RolloutBuffer(), None, QueueLimits(2, 1, 2))
    assert queue.idle  # no weights yet
    queue.weights_changed(0)
    assert not queue.idle
    first = start(queue)
    assert len(first) == 2 and not queue.idle
    queue.hold()
    queue.finished(group(first[0], 0))
    assert not queue.idle
    queue.finished(group(first[1], 0))
    assert queue.idle


def test_a_step_waits_for_groups_that_the_later_ones_would_be_too_late_for() -> None:
    queue = RolloutQueue(PromptStream(rows(30), 0, 1), RolloutBuffer(), None, QueueLimits(2, 2, 100))
    queue.weights_changed(0)
    first = start(queue)
    for item in first[:2]:
        queue.finished(group(item, 0))
    queue.take()
    queue.weights_changed(1)
    fresh = start(queue)
    for item in fresh:
        queue.finished(group(item, 1))
    assert not queue.ready  # four of version 0 run, and only two could be trained on in the step after this one
    queue.finished(group(first[2], 0))
    assert not queue.ready
    queue.finished(group(first[3], 0, 1))
    taken = queue.take()
    assert [g.item for g in taken.groups] == first[2:4]
    assert (taken.waiting, taken.in_flight) == (2, 2)
    assert {k: v for k, v in taken.metrics().items() if "waiting" in k or "flight" in k or "stale" in k} == {
        "rollout/groups_waiting": 2, "rollout/groups_in_flight": 2, "rollout/stale_groups": 0,
    }  # fmt: skip


def test_groups_that_are_too_old_are_dropped_counted_and_generated_again() -> None:
    """A run goes on with a smaller queue than the one whose checkpoint it loads."""
    before = PromptStream(rows(8), 5, 1)
    buffer = RolloutBuffer()
    for item, version in zip(before.take(6), (3, 3, 4, 4, 5, 5), strict=True):
        buffer.put(group(item, version))
    unfinished = [item.group_id for item in before.take(1)]
    stream = PromptStream(rows(8), 5, 1)
    stream.load_state_dict(before.state_dict(unfinished))
    assert stream.remaining == 2
    run = Run(stream, QueueLimits(2, 1, 8), False, random.Random(1), buffer=buffer, first_version=5)
    assert stream.remaining == 4  # the two of version 3 come again
    while run.step():
        pass
    assert sorted(g for step in run.steps for g in step) == list(range(8))
    assert max(run.ages) <= 1 and run.stale >= 2


def test_a_checkpoint_loses_nothing_of_what_was_generated_and_not_trained_on() -> None:
    """Prompts 0 to 9, 6 started, 0 and 1 trained on; 2 waits and 3, 4, 5 run when the checkpoint is made."""
    stream, buffer = PromptStream(rows(10), 0, 1), RolloutBuffer()
    queue = RolloutQueue(stream, buffer, None, QueueLimits(2, 4, 6))
    queue.weights_changed(0)
    started = start(queue)
    assert [item.group_id for item in started] == [0, 1, 2, 3, 4, 5]
    for item in started[:3]:
        queue.finished(group(item, 0))
    assert [g.item.group_id for g in queue.take().groups] == [0, 1]
    again, kept = PromptStream(rows(10), 0, 1), RolloutBuffer()
    again.load_state_dict(stream.state_dict(item.group_id for item in queue.in_flight))
    kept.load_state_dict(buffer.state_dict())
    run = Run(again, QueueLimits(2, 4, 6), True, random.Random(0), buffer=kept, first_version=1)
    while run.step():
        pass
    assert sorted(g for step in run.steps for g in step) == list(range(2, 10))


def test_a_run_that_goes_on_with_a_smaller_queue_trains_on_every_prompt_once() -> None:
    """Also where the buffer has more of the next episode than may be generated ahead."""
    stale = 0
    for seed in range(60):
        chance = random.Random(seed)
        count, batch = chance.randint(2, 9), chance.randint(1, 4)
        first = Run(PromptStream(rows(count), seed, 3), QueueLimits(batch, 4, 3 * batch), False, chance)
        for _ in range(chance.randint(1, 3)):
            first.step()
        stream, buffer = PromptStream(rows(count), seed, 3), RolloutBuffer()
        stream.load_state_dict(first.stream.state_dict(item.group_id for item in first.queue.in_flight))
        buffer.load_state_dict(first.buffer.state_dict())
        limits = QueueLimits(batch, 1, 3 * batch)
        second = Run(stream, limits, False, chance, buffer=buffer, first_version=first.version)
        while second.step():
            assert len(second.steps) <= 3 * count
        assert sorted(g for run in (first, second) for step in run.steps for g in step) == list(range(3 * count))
        assert max(second.ages, default=0) <= 1
        stale += second.stale
    assert stale > 0


def test_a_step_gets_the_prompts_that_it_lacks_whatever_waits_for_later_ones() -> None:
    """Groups 0 to 2 of the first episode and 4 to 7 of the second are done, and 3 ran when the checkpoint was made."""
    before, buffer = PromptStream(rows(4), 0, 2), RolloutBuffer()
    for item in [*before.take(4), *before.take(4)]:
        if item.group_id != 3:
            buffer.put(group(item, 5))
    stream = PromptStream(rows(4), 0, 2)
    stream.load_state_dict(before.state_dict([3]))
    queue = RolloutQueue(stream, buffer, None, QueueLimits(2, 1, 8))
    queue.weights_changed(5)
    assert start(queue) == [] and queue.ready
    assert [g.item.group_id for g in queue.take().groups] == [0, 1]
    (item,) = start(queue)
    assert item.group_id == 3


def test_a_stale_group_does_not_hold_back_the_position_in_the_data() -> None:
    """Groups 0 to 9, of which 3 was sampled by weights that are too old."""
    stream, buffer = PromptStream(rows(10), 0, 1), RolloutBuffer()
    for item in stream.take(10):
        buffer.put(group(item, 3 if item.group_id == 3 else 4))
    queue = RolloutQueue(stream, buffer, None, QueueLimits(9, 1, 10))
    queue.weights_changed(5)
    state = stream.state_dict(item.group_id for item in queue.in_flight)
    assert (state["consumed"], state["returned"]) == (10, [3])
    (item,) = start(queue)
    queue.finished(group(item, 5))
    taken = queue.take()
    assert taken.stale == taken.metrics()["rollout/stale_groups"] == 1
    assert [g.item.group_id for g in taken.groups] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    last = queue.take()
    assert [g.item.group_id for g in last.groups] == [3] and last.stale == 0  # it is told once


def test_a_group_beyond_the_bound_is_never_trained_on() -> None:
    queue = RolloutQueue(PromptStream(rows(2), 0, 1), RolloutBuffer(), None, QueueLimits(1, 1, 1))
    queue.weights_changed(4)
    (item,) = start(queue)
    queue.finished(group(item, 2))  # an engine that kept old weights
    with pytest.raises(StalenessError, match="step 4 would train on version 2: more than 1 old"):
        queue.take()


def test_a_filter_that_drops_everything_ends_the_run() -> None:
    limits = QueueLimits(2, 1, 4, filter_rounds=3)
    stream = PromptStream(rows(50), 0, 1)
    run = Run(stream, limits, False, random.Random(0), unlearnable=frozenset(range(50)))
    with pytest.raises(NoLearnableGroups, match=r"the last 6 were dropped one after another \(.*mean_low 6\)"):
        run.step()
    run = Run(PromptStream(rows(3), 0, 1), limits, False, random.Random(0), unlearnable=frozenset(range(3)))
    with pytest.raises(NoLearnableGroups, match="the data ran out"):
        run.step()


def test_a_user_filters_verdict_counts_and_its_reserve_is_used_before_the_run_gives_up() -> None:
    queue = RolloutQueue(
        PromptStream(rows(9), 0, 1), RolloutBuffer(), CustomFilter("f"), QueueLimits(2, 1, 2, filter_rounds=2)
    )
    queue.weights_changed(0)
    for number in range(5):
        item = queue.next_prompt()
        assert item is not None and not queue.ready
        queue.finished(replace(group(item, 0), verdict=DynamicFilterOutput(False, "dull", number > 0)))
    taken = queue.take()
    assert len(taken.groups) == taken.insufficient == 2
    metrics = taken.metrics()
    assert (metrics["rollout/filtered_dull"], metrics["rollout/groups_insufficient"]) == (5, 2)
    item = queue.next_prompt()
    assert item is not None
    with pytest.raises(NoLearnableGroups, match="the last 6 were dropped one after another .*dropped: dull 6"):
        queue.finished(replace(group(item, 0), verdict=DynamicFilterOutput(False, "dull")))


def test_groups_without_samples_are_dropped() -> None:
    queue = RolloutQueue(PromptStream(rows(2), 0, 1), RolloutBuffer(), None, QueueLimits(2, 1, 2))
    queue.weights_changed(0)
    first, second = start(queue)
    queue.finished(Group(first, (), (EpisodeFailure(first.prompt_id, 0, "reward", "no"),)))
    assert not queue.ready
    queue.finished(group(second, 0))
    taken = queue.take()
    assert len(taken.groups) == 1 and taken.metrics()["rollout/filtered_no_samples"] == 1
