"""What an agent returns, beside what the engine recorded of its calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.agent_engine import EngineCall
from openrlhf.rollout.agent_output import trajectory_from_agent_output
from openrlhf.rollout.errors import AgentError
from openrlhf.rollout.protocol import GenerationResult
from openrlhf.rollout.trajectory import Trajectory


def call(prompt: list[int], ids: list[int], reason: str = "stop", version: int = 0, scored: bool = True) -> EngineCall:
    given = np.full(len(ids), -0.5, dtype=np.float32) if scored else None
    return EngineCall(prompt, GenerationResult(ids, given, reason, version))


def checked(ids: list[Any], ranges: list[tuple[int, int]], *calls: EngineCall, **more: Any) -> Trajectory:
    logprobs = more.pop("want_logprobs", False)
    output = {"observation_tokens": ids, "action_ranges": ranges, **more}
    return trajectory_from_agent_output(
        output, prompt_id=0, group_id=0, sample_index=0, calls=calls, weight_version=9, want_logprobs=logprobs
    )


@pytest.mark.parametrize(("reasons", "truncated"), [(("stop", "length"), True), (("length", "stop"), False)])
def test_without_a_word_of_the_agent_the_last_turn_says_whether_it_was_cut(
    reasons: tuple[str, str], truncated: bool
) -> None:
    calls = [call([0], [1, 2], reasons[0]), call([0, 1, 2, 3], [4], reasons[1])]
    trajectory = checked([0, 1, 2, 3, 4], [(1, 3), (4, 5)], *calls)
    assert (trajectory.truncated, trajectory.finish_reason) == (truncated, reasons[1])
    # Also where it changed what was sampled in it.
    trajectory = checked([0, 1, 2, 3, 7], [(1, 3), (4, 5)], *calls)
    assert (trajectory.truncated, trajectory.finish_reason) == (truncated, reasons[1])
    assert checked([0, 1], [(1, 2)]).finish_reason == "stop"


def test_ids_that_no_call_accounts_for_are_as_old_as_the_oldest_call() -> None:
    calls = [call([0], [1, 2], version=5), call([0, 1, 2, 3], [4], version=3)]
    trajectory = checked([0, 1, 2, 3, 7], [(1, 3), (4, 5)], *calls)
    assert trajectory.weight_version.tolist() == [-1, 5, 5, -1, 3]
    assert checked([0, 1], [(1, 2)]).weight_version.tolist() == [-1, 9]


def test_a_turn_without_tokens_is_left_out() -> None:
    trajectory = checked([0, 1, 2], [(1, 1), (1, 2), (3, 3)])
    assert trajectory.action_mask.tolist() == [False, True, False]


def test_ids_are_whole_numbers_from_0() -> None:
    assert checked([0, np.int64(1)], [(1, 2)]).token_ids.tolist() == [0, 1]
    for wrong in (-1, True, 1.0, "1"):
        with pytest.raises(AgentError, match=r"observation_tokens\[1\] is .*, not a token id"):
            checked([0, wrong], [(0, 1)])


def test_log_probs_come_from_the_call_or_are_asked_for() -> None:
    trajectory = checked([0, 1, 2], [(1, 3)], call([0], [1, 2]), want_logprobs=True)
    assert trajectory.logprobs is not None and trajectory.logprobs.tolist() == [0.0, -0.5, -0.5]
    for own in (call([0], [1, 2], scored=False), call([0], [1, 3])):
        with pytest.raises(AgentError, match="doesn't account for tokens 1 to 3"):
            checked([0, 1, 2], [(1, 3)], own, want_logprobs=True)
