"""Dynamic filtering, the collector of groups, and the rollout buffer."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.buffer import RolloutBuffer, freshest_first, group_version
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.filters import CollectedGroups, DropLimit, DynamicFilter, GroupCollector
from openrlhf.rollout.group import EpisodeFailure, Group, PromptItem
from openrlhf.rollout.trajectory import Trajectory


def group(prompt_id: int, scores: list[Any], rewards: list[Any] | None = None, version: int = 0) -> Group:
    item = PromptItem(prompt_id, prompt_id + 100, f"p{prompt_id}", [1, 2], label=prompt_id, metadata={"a": [1]})
    trajectories = tuple(
        Trajectory(
            prompt_id=prompt_id,
            group_id=item.group_id,
            sample_index=index,
            token_ids=np.array([1, 2, 3]),
            action_mask=np.array([False, False, True]),
            logprobs=np.array([0, 0, -0.5], dtype=np.float32),
            weight_version=np.array([-1, -1, version]),
            reward=reward,
            score=score,
        )
        for index, (score, reward) in enumerate(zip(scores, rewards or scores, strict=True))
    )
    return Group(item, trajectories)


def judge(*args: Any, low: float = 0.0, high: float = 1.0) -> str | None:
    return DynamicFilter(low, high).judge(group(0, *args))


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([0.4] * 4, "zero_spread"),
        ([0.2, 0.6, 0.4, 0.4], None),
        ([0.0] * 4, "mean_low"),
        ([1.0] * 4, "mean_high"),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], "zero_spread"),
        ([0.5], "too_few_samples"),
        ([0.5, None], "no_score"),
        ([-1.0, 0.5], "mean_low"),
        ([0.0, 0.0, 0.0, 0.5], None),
    ],
)
def test_only_groups_with_a_signal_are_kept(scores: list[Any], reason: str | None) -> None:
    assert judge(scores) == reason


def test_the_mean_is_of_scores_and_the_spread_of_rewards() -> None:
    assert judge([0.5, 0.5], [0.1, 0.9]) is None
    assert judge([0.2, 0.8], [3.0, 3.0]) == "zero_spread"
    assert judge([0.5, 0.6], [-7.0, 9.0]) is None
    assert judge([0.5, 1.5], low=0.0, high=1.0) == "mean_high"


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
def test_rewards_that_differ_by_rounding_are_equal(size: float) -> None:
    """Relative to the largest reward, and to 1 where all are smaller."""
    unit = max(1.0, size)
    assert judge([0.5, 0.5], [-size, -size + 0.5e-9 * unit]) == "zero_spread"
    assert judge([0.5, 0.5], [-size, -size + 2e-9 * unit]) is None
    assert judge([0.5, 0.5, 0.5], [0.0, 0.0, size]) is None


def run(
    scores: dict[int, list[Any]] | Any,
    *,
    data: int,
    target: int,
    buffer: RolloutBuffer | None = None,
    order: int = 0,
    start: int = 0,
    filtering: bool = True,
    may_be_empty: bool = False,
    **options: Any,
) -> tuple[CollectedGroups, list[int]]:
    """Collects with three groups in flight that finish in a random order."""
    drawn: list[int] = []
    source = iter(range(start, start + data))
    pick = random.Random(order)

    def draw(count: int) -> list[PromptItem]:
        ids = [i for _, i in zip(range(count), source, strict=False)]
        drawn.extend(ids)
        return [group(i, [0.0]).item for i in ids]

    def rollout(items: Iterator[PromptItem]) -> Iterator[Group]:
        running: list[PromptItem] = []
        while True:
            while len(running) < 3 and (item := next(items, None)) is not None:
                running.append(item)
            if not running:
                return
            done = running.pop(pick.randrange(len(running)))
            yield group(done.prompt_id, scores(done.prompt_id) if callable(scores) else scores[done.prompt_id])

    collector = GroupCollector(
        target,
        draw,
        DynamicFilter() if filtering else None,
        buffer if buffer is not None else RolloutBuffer(),
        **options,
    )
    for finished in rollout(collector):
        collector.add(finished)
    collected = collector.finish(may_be_empty)
    assert next(collector, None) is None
    return collected, drawn


def ids(groups: Any) -> list[int]:
    return [g.item.prompt_id for g in groups]


def thirds_are_good(prompt_id: int) -> list[float]:
    return [0.0, 1.0] if prompt_id % 3 == 0 else [1.0, 1.0]


@pytest.mark.parametrize("order", range(8))
def test_the_groups_of_a_step_do_not_depend_on_the_order_of_completion(order: int) -> None:
    collected, drawn = run(thirds_are_good, data=100, target=4, order=order)
    assert ids(collected.groups) == [0, 3, 6, 9]
    assert drawn == list(range(10))
    assert (collected.tally.seen, collected.tally.kept, collected.tally.dropped) == (10, 4, {"mean_high": 6})
    assert collected.metrics() == {
        "rollout/groups_seen": 10.0,
        "rollout/groups_kept": 4.0,
        "rollout/filtered_mean_high": 6.0,
        "rollout/lost_samples": 0.0,
        "dynamic_filtering_pass_rate": 40.0,
    }


def test_surplus_good_groups_wait_in_the_buffer() -> None:
    buffer = RolloutBuffer()
    collected, drawn = run(thirds_are_good, data=100, target=2, buffer=buffer, first_draw=12, order=3)
    assert ids(collected.groups) == [0, 3] and drawn == list(range(12))
    assert len(buffer) == 2
    collected, drawn = run(thirds_are_good, data=100, target=3, buffer=buffer, start=12)
    assert ids(collected.groups) == [6, 9, 12] and drawn == [12]
    assert len(buffer) == 0 and collected.tally.kept == 1


@pytest.mark.parametrize("first_draw", [0, 12])
def test_a_full_buffer_needs_no_prompts(first_draw: int) -> None:
    buffer = RolloutBuffer()
    for prompt_id in range(3):
        buffer.put(group(prompt_id, [0.0, 1.0]))
    collected, drawn = run(thirds_are_good, data=100, target=2, buffer=buffer, start=50, first_draw=first_draw)
    assert (ids(collected.groups), drawn, collected.tally.seen) == ([0, 1], [], 0)
    assert "dynamic_filtering_pass_rate" not in collected.metrics()


def test_only_the_first_draw_has_prompts_to_spare() -> None:
    """Then one comes for each group that is still lacking; a first draw may be larger than the limit on draws."""
    collected, drawn = run(thirds_are_good, data=100, target=4, first_draw=5, order=2)
    assert ids(collected.groups) == [0, 3, 6, 9] and drawn == list(range(10))
    collected, drawn = run(thirds_are_good, data=100, target=1, first_draw=5, max_rounds=1)
    assert ids(collected.groups) == [0] and drawn == list(range(5))
    buffer = filled(0)
    collected, drawn = run(thirds_are_good, data=100, target=2, buffer=buffer, start=6, first_draw=4)
    assert ids(collected.groups) == [0, 6] and drawn == [6, 7, 8]


def test_prompts_come_in_the_order_in_which_they_were_drawn() -> None:
    items = [group(i, [1.0]).item for i in range(5)]
    collector = GroupCollector(3, lambda count: items[:count], None, RolloutBuffer())
    assert [item.prompt_id for item in collector] == [0, 1, 2]


def test_when_the_data_runs_out_what_was_kept_is_used() -> None:
    collected, _ = run(thirds_are_good, data=5, target=4)
    assert ids(collected.groups) == [0, 3]
    collected, _ = run(thirds_are_good, data=0, target=4)
    assert collected.groups == () and collected.tally.seen == 0


def test_constant_rewards_end_with_counts() -> None:
    words = r"0 of 2 groups with a mean score strictly between 0 and 1 after 5 were seen, and the data ran out "
    with pytest.raises(NoLearnableGroups, match=words + r"\(kept 0, seen 5; dropped: mean_high 5\)"):
        run(lambda i: [1.0] * 4, data=5, target=2)
    buffer = RolloutBuffer()
    words = r"1 of 2 groups .* after 6 were seen, and the limit of 6 prompts was reached \(kept 1, seen 6"
    with pytest.raises(NoLearnableGroups, match=words):
        run(lambda i: [0.0, 1.0] if i == 4 else [1.0, 1.0], data=10**6, target=2, max_rounds=3, buffer=buffer)
    assert ids(buffer.take(1)) == [4]  # what was kept is not lost


def test_groups_dropped_one_after_another_are_counted_in_the_order_of_the_draw_over_steps() -> None:
    drops = DropLimit(5)
    for order in range(4):  # of 0 .. 6 the good ones are 0 and 3 (and 6): whichever is done last
        run(thirds_are_good, data=6, target=4, order=order, drops=drops)
        run(lambda i: [1.0, 1.0], data=2, target=4, drops=drops, may_be_empty=True)  # 4 in a row
        assert not drops.reached
    words = r"the last 6 were dropped one after another \(kept 0, seen 6; dropped: mean_high 6\)"
    with pytest.raises(NoLearnableGroups, match=words):
        run(lambda i: [1.0, 1.0], data=2, target=4, drops=drops, may_be_empty=True)


def test_without_a_filter_only_empty_groups_are_replaced() -> None:
    collected, drawn = run(lambda i: [] if i == 1 else [1.0], data=9, target=3, filtering=False)
    assert ids(collected.groups) == [0, 2, 3] and drawn == [0, 1, 2, 3]
    assert collected.tally.dropped == {"no_samples": 1}
    assert "dynamic_filtering_pass_rate" not in collected.metrics()


def test_without_a_filter_lost_groups_do_not_stop_the_run() -> None:
    collected, drawn = run(lambda i: [] if i == 5 else [1.0], data=99, target=8, filtering=False, max_rounds=1)
    assert ids(collected.groups) == [0, 1, 2, 3, 4, 6, 7] and drawn == list(range(8))
    assert collected.tally.dropped == {"no_samples": 1}
    with pytest.raises(NoLearnableGroups, match=r"0 of 2 groups after 2 were seen.*dropped: no_samples 2"):
        run(lambda i: [], data=99, target=2, filtering=False, max_rounds=1)


def test_the_collector_checks_its_callers() -> None:
    items = [group(i, [1.0]).item for i in range(2)]
    asked: list[int] = []
    collector = GroupCollector(2, lambda count: asked.append(count) or items[:count], DynamicFilter(), RolloutBuffer())
    assert list(collector) == items and list(collector) == [] and asked == [2]
    collector.add(group(0, [1.0, 1.0]))  # all are right: another is drawn in its place
    with pytest.raises(ValueError, match="group id 100 was drawn twice"):
        next(collector)
    with pytest.raises(ValueError, match="group id 107 was never drawn"):
        collector.add(group(7, [1.0]))


# --- The buffer


def filled(*versions: int) -> RolloutBuffer:
    buffer = RolloutBuffer()
    for index, version in enumerate(versions):
        buffer.put(group(index, [0.0, 1.0], version=version))
    return buffer


def test_first_in_first_out() -> None:
    buffer = filled(0, 0, 0)
    assert len(buffer) == 3
    assert ids(buffer.take(2)) == [0, 1] and ids(buffer.take(1)) == [2] and len(buffer) == 0
    with pytest.raises(ValueError, match="1 groups asked for, 0 are in"):
        buffer.take(1)


def test_freshest_first_and_own_selections() -> None:
    assert ids(filled(1, 3, 2, 3).take(3, freshest_first)) == [1, 3, 2]
    assert ids(filled(0, 0, 0).take(2, lambda groups, count: [2, 0])) == [2, 0]
    for wrong in ([0], [0, 0], [0, 3], [0, 1, 1]):
        buffer = filled(0, 0, 0)
        with pytest.raises(ValueError, match="needed are 2 different indices below 3"):
            buffer.take(2, lambda groups, count, wrong=wrong: wrong)
        assert len(buffer) == 3


def test_stale_groups_are_removed_and_returned() -> None:
    buffer = filled(1, 3, 2)
    assert ids(buffer.drop_stale(current_version=4, max_staleness=2)) == [0]
    assert ids(buffer.take(2)) == [1, 2]
    assert group_version(Group(group(0, []).item, ())) == -1


def test_a_group_is_as_old_as_its_oldest_sample() -> None:
    samples = [group(0, [1.0], version=version).trajectories[0] for version in (3, 1, 2)]
    assert group_version(Group(group(0, []).item, tuple(samples))) == 1


def test_a_group_is_in_the_buffer_once() -> None:
    buffer = filled(0)
    with pytest.raises(ValueError, match="group id 100 is in the rollout buffer already"):
        buffer.put(group(0, [1.0]))


def test_the_state_survives_a_checkpoint() -> None:
    buffer = filled(1, 2)
    lost = Group(group(7, []).item, (), (EpisodeFailure(7, 0, "agent", "why"),))
    buffer.put(lost)
    compared = group(8, [1.0])
    buffer.put(replace(compared, item=replace(compared.item, greedy_baseline=True), baseline=compared.trajectories[0]))
    state = pickle.loads(pickle.dumps(buffer.state_dict()))
    again = RolloutBuffer()
    again.load_state_dict(state)
    for before, after in zip(buffer.take(4), again.take(4), strict=True):
        assert (after.baseline is None) == (before.baseline is None) == (before.item.prompt_id != 8)
        assert after.item == before.item and after.failures == before.failures
        for one, other in zip(before.trajectories, after.trajectories, strict=True):
            assert json.dumps(one.to_dict()) == json.dumps(other.to_dict())
    with pytest.raises(ValueError, match="state has version 7, this is 1"):
        again.load_state_dict({"version": 7})
