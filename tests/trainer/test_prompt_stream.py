"""The order of prompts: every one once an episode, the same after a restart, in any batch sizes."""

from __future__ import annotations

import pytest

from openrlhf.datasets.prompts import PromptRow
from openrlhf.trainer.prompt_stream import PromptStream
from openrlhf.utils.errors import ExplainedError


def rows(count: int) -> list[PromptRow]:
    return [PromptRow(i, f"prompt {i}", [i, i + 1], str(i), "default") for i in range(count)]


def drain(stream: PromptStream, size: int) -> list[tuple[int, int, int]]:
    """(prompt id, group id, epoch) of all prompts, drawn ``size`` at a time."""
    drawn = []
    while items := stream.take(size):
        drawn.extend((item.prompt_id, item.group_id, item.epoch) for item in items)
    return drawn


def test_every_prompt_comes_once_an_episode_and_groups_are_numbered_throughout() -> None:
    drawn = drain(PromptStream(rows(12), seed=3, episodes=2), 3)
    for episode in range(2):
        assert sorted(p for p, _, e in drawn if e == episode) == list(range(12))
    assert [group for _, group, _ in drawn] == list(range(24))
    orders = [[p for p, _, e in drawn if e == episode] for episode in range(2)]
    assert orders[0] != orders[1] != list(range(12))


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    assert drain(PromptStream(rows(10), 1, 2), 3) == drain(PromptStream(rows(10), 1, 2), 4)
    assert drain(PromptStream(rows(10), 1, 2), 3) != drain(PromptStream(rows(10), 2, 2), 3)


def test_greedy_responses_are_asked_for_with_every_prompt() -> None:
    assert [item.greedy_baseline for item in PromptStream(rows(2), 1, 1, greedy_baseline=True).take(2)] == [True, True]
    assert not PromptStream(rows(1), 1, 1).take(1)[0].greedy_baseline


def test_a_draw_ends_with_the_episode() -> None:
    stream = PromptStream(rows(5), 0, 2)
    assert [len(stream.take(3)) for _ in range(5)] == [3, 2, 3, 2, 0]
    assert stream.remaining == 0


def test_a_restart_goes_on_with_the_same_prompts() -> None:
    whole = drain(PromptStream(rows(12), 7, 2), 3)
    first = PromptStream(rows(12), 7, 2)
    begun = [(i.prompt_id, i.group_id, i.epoch) for _ in range(2) for i in first.take(3)]
    second = PromptStream(rows(12), 7, 2)
    second.load_state_dict(first.state_dict())
    assert second.episode == 0 and second.consumed == 6
    assert begun + drain(second, 4) == whole


def test_prompts_that_are_given_back_come_first_and_under_their_own_numbers() -> None:
    stream = PromptStream(rows(5), 3, 2)
    drawn = [*stream.take(4), *stream.take(4), *stream.take(1)]
    assert [item.group_id for item in drawn] == [0, 1, 2, 3, 4, 5]
    stream.give_back([5, 3, 1])
    assert (stream.episode, stream.remaining, stream.remaining_in(0), stream.remaining_in(1)) == (0, 7, 2, 5)
    again = PromptStream(rows(5), 3, 2)
    again.load_state_dict(stream.state_dict(unfinished=[4]))
    assert [item.group_id for item in again.take(8)] == [1, 3, 4]  # never across the end of an episode
    items = stream.take(2)
    assert items == [drawn[1], drawn[3]]
    assert [item.group_id for item in stream.take(3)] == [5, 6, 7] and stream.remaining == 2
    assert stream.consumed == 8


@pytest.mark.parametrize(("count", "seed", "what"), [(11, 7, "rows = 12"), (12, 8, "seed = 7")])
def test_another_prompt_set_or_seed_is_refused(count: int, seed: int, what: str) -> None:
    state = PromptStream(rows(12), 7, 1).state_dict()
    with pytest.raises(ExplainedError, match=what):
        PromptStream(rows(count), seed, 1).load_state_dict(state)


def test_no_prompts_at_all() -> None:
    with pytest.raises(ValueError, match="empty"):
        PromptStream([], 0, 1)
