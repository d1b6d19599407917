"""Multi-turn agents: ids, masks, rewards, limits and options from turn to turn."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import TOK, A, B, C, Scripted, one, play, scripted, step
from rollout_helpers import EOS, ScriptedEngine, item, mark_beginnings

from openrlhf.rollout.agents import MultiTurnAgentExecutor
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.protocol import GenerationResult, SamplingParams
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


def test_sampled_ids_are_never_encoded_again() -> None:
    executor, cls = scripted(step(0.25, "c"), step(torch.tensor(1.0), "", True))
    engine = ScriptedEngine([([A, B], "stop"), ([B, EOS], "stop")])
    trajectory = one(executor, engine)
    start = TOK.encode("q")
    assert engine.prompts == [start, [*start, A, B, C]]  # a, b as sampled, not the merged piece "ab"
    assert trajectory.token_ids.tolist() == [*start, A, B, C, B, EOS]
    assert trajectory.action_mask.tolist() == [False, True, True, False, True, True]
    assert trajectory.logprobs is not None
    np.testing.assert_allclose(trajectory.logprobs, [0, -0.5, -0.51, 0, -0.5, -0.51])
    assert trajectory.weight_version.tolist() == [-1, 3, 3, -1, 3, 3]
    assert trajectory.reward == trajectory.score == 1.25
    assert trajectory.step_rewards == ((2, 0.25), (5, 1.0))
    assert not trajectory.truncated and trajectory.finish_reason == "stop"
    assert trajectory.metadata["label"] == "gold" and trajectory.metadata["response"] == "abcb<eos>"
    assert "unsampled_action_ranges" not in trajectory.metadata
    assert [s["observation_text"] for s in cls.seen] == ["q", "qabc"]
    assert [s["action_text"] for s in cls.seen] == ["ab", "b"]
    assert all(s["label"] == "gold" for s in cls.seen)


def test_feedback_goes_on_without_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_beginnings(monkeypatch)
    executor, cls = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "stop"), ([B, EOS], "stop")]))
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, C, B, EOS] and cls.seen[1]["action_text"] == "b"


@pytest.mark.parametrize("reward", [0.5, np.float32(0.5), np.array([0.5]), torch.tensor(0.5), torch.tensor([0.5])])
def test_rewards_of_any_kind_are_numbers(reward: Any) -> None:
    executor, _ = scripted(step(reward, done=torch.tensor(True), scores=reward, extra_logs={"a": reward, "b": [2]}))
    trajectory = one(executor, ScriptedEngine([[A, EOS]]))
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (0.5, 0.5, {"a": 0.5, "b": 2.0})


def test_last_score_and_logs_count_and_a_score_of_zero_is_a_score() -> None:
    executor, _ = scripted(
        step(1.0, "c", scores=0.7, extra_logs={"a": 1}), step(1.0, done=True, scores=0.0, extra_logs={"b": 2})
    )
    trajectory = one(executor, ScriptedEngine([[A, EOS]] * 2))
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (2.0, 0.0, {"b": 2.0})


def test_a_second_turn_cut_by_the_limit_is_truncated() -> None:
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "stop"), ([B, B], "length")]))
    assert trajectory.truncated and trajectory.finish_reason == "length"
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    trajectory = one(executor, ScriptedEngine([([A], "length"), ([B, B], "stop")]))
    assert not trajectory.truncated


def test_one_turn_equals_the_single_turn_path() -> None:
    sampling = SamplingParams(max_tokens=3, logprobs=True)
    for reply in (([A, B, EOS], "stop"), ([A, B, C], "length")):
        executor, _ = scripted(step(1.0, done=True))
        by_agent = one(executor, ScriptedEngine([reply]), sampling=sampling)
        plain = EpisodeSpec(sampling=sampling, max_length=32, tokenizer=TOK)
        group = asyncio.run(run_group(item(TOK, "q", 4, label="gold"), 1, ScriptedEngine([reply]), plain))
        single = group.trajectories[0]
        for name in ("token_ids", "action_mask", "logprobs", "weight_version"):
            np.testing.assert_array_equal(getattr(by_agent, name), getattr(single, name))
        assert (by_agent.truncated, by_agent.finish_reason) == (single.truncated, single.finish_reason)
        assert by_agent.metadata["response"] == single.metadata["response"]


def test_the_episode_stays_within_max_length() -> None:
    executor, _ = scripted(step(0.0, "ccc"), step(0.5, "ccc"), step(9.0))
    engine = ScriptedEngine(lambda ids, sampling: ([A] * min(2, sampling.max_tokens or 2), "stop"))
    trajectory = one(executor, engine, max_length=8)
    assert [s.max_tokens for s in engine.sampling] == [7, 2]
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, A, C, C, C, A, A]
    assert trajectory.truncated and trajectory.reward == 0.5


def test_turns_have_all_the_room_and_max_tokens_only_reserves_some_for_the_first() -> None:
    """As in OpenRLHF: 63 and 58 tokens for two turns, of which the first wrote 4 and was answered with 1."""

    class Looking(AgentInstanceBase):
        seen: list[int] = []

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.seen.append(state_dict["sampling_params"].max_tokens)
            return step(1.0, "b", len(self.seen) == 2)

    engine = ScriptedEngine(lambda ids, sampling: ([A] * 4, "stop"))
    one(MultiTurnAgentExecutor(Looking), engine, sampling=SamplingParams(max_tokens=4), max_length=64)
    assert [s.max_tokens for s in engine.sampling] == Looking.seen == [63, 58]


def test_an_environment_may_close_in_step_what_it_opened_in_reset() -> None:
    """Clients of tools want to be closed in the task that opened them."""

    class Connected(AgentInstanceBase):
        tasks: list[Any] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.tasks.append(asyncio.current_task())
            return states

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.tasks.append(asyncio.current_task())
            return step(1.0, done=True)

    one(MultiTurnAgentExecutor(Connected), ScriptedEngine([[A, EOS]]))
    assert len(Connected.tasks) == 2 and len(set(Connected.tasks)) == 1


def test_an_executor_may_limit_its_turns() -> None:
    _, cls = scripted(step(0.0, "c"), step(1.0), step(1.0, done=True))
    engine = ScriptedEngine(lambda ids, sampling: ([A] * 9, "length"))
    trajectory = one(MultiTurnAgentExecutor(cls, max_turn_tokens=3), engine, max_length=9)
    assert [s.max_tokens for s in engine.sampling] == [3, 3, 1]
    assert trajectory.response_length == 7 and trajectory.total_length == 9
    with pytest.raises(ValueError, match="max_turn_tokens must be at least 1"):
        MultiTurnAgentExecutor(cls, max_turn_tokens=0)


def test_an_agent_may_limit_its_next_turns() -> None:
    class Limiting(AgentInstanceBase):
        def __init__(self) -> None:
            self.limits: list[int | None] = [2, 5, None]

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            if not self.limits:
                return step(1.0, done=True)
            params = state_dict["sampling_params"].clone()
            params.max_tokens = self.limits.pop(0)
            return step(0.0, sampling_params=params)

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    one(MultiTurnAgentExecutor(Limiting), engine, max_length=20)
    assert [s.max_tokens for s in engine.sampling] == [19, 2, 5, 16]


def test_options_that_an_agent_made_with_vllm_set_no_limit_by_themselves() -> None:
    vllm = pytest.importorskip("vllm")
    executor, _ = scripted(step(sampling_params=vllm.SamplingParams(temperature=0.5)), step(done=True))
    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    one(executor, engine, max_length=64)
    assert [(s.temperature, s.max_tokens) for s in engine.sampling] == [(1.0, 63), (0.5, 62)]


def test_the_last_feedback_is_kept_but_not_trained_on() -> None:
    executor, _ = scripted(step(1.0, "c", True))
    trajectory = one(executor, ScriptedEngine([[A, EOS]]))
    assert trajectory.token_ids.tolist()[-1] == C and not trajectory.action_mask[-1]


def test_sampling_parameters_change_from_the_next_turn_on_and_only_for_this_sample() -> None:
    class Warmer(AgentInstanceBase):
        def __init__(self) -> None:
            self.turn = 0

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.turn += 1
            params = state_dict["sampling_params"]
            if self.turn == 1:
                params.temperature = 0.3
                return step(0.0, "c")
            changed = params.clone()
            changed.top_k, changed.stop, changed.guided_choice = 5, "x", ["a"]
            return step(1.0, "c", self.turn == 3, sampling_params=changed)

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"))
    play(MultiTurnAgentExecutor(Warmer), engine, n=2)
    by_turn = sorted(engine.sampling, key=lambda s: (-s.temperature, s.top_k))
    assert [(s.temperature, s.top_k, s.stop) for s in by_turn] == [(1.0, -1, ())] * 2 + [(0.3, -1, ())] * 2 + [
        (0.3, 5, ("x",))
    ] * 2
    assert by_turn[-1].extra == (("guided_choice", ["a"]),)
    assert all(s.logprobs for s in engine.sampling)
    assert len({s.seed for s in engine.sampling}) == 6  # every sample and every turn has its own


def test_calls_side_by_side_have_seeds_of_their_own() -> None:
    class BestOfFour(AgentExecutorBase):
        async def execute(self, **given: Any) -> dict[str, Any]:
            engine, ids = given["llm_engine"], given["llm_engine"].prompt_token_ids
            calls = [engine.generate(ids, given["sampling_params"]) for _ in range(4)]
            best = (await asyncio.gather(*calls))[0].outputs[0].token_ids
            whole = {"observation_tokens": [*ids, *best], "action_ranges": [(len(ids), len(ids) + len(best))]}
            return {"prompt": given["prompt"], "label": given["label"], "reward": 1.0, **whole}

    engine = ScriptedEngine(lambda ids, sampling: ([A], "stop"), delays=[0.01] * 8)
    play(BestOfFour(), engine, n=2)
    assert len({s.seed for s in engine.sampling}) == 8


def test_reset_gives_the_first_observation() -> None:
    class Framed(Scripted):
        steps = [step(1.0, done=True)]
        given: list[Any] = []

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            self.given.append(states)
            return {"observation": "x" + states["observation"] + "y"}

    engine = ScriptedEngine([[A, EOS]])
    trajectory = one(MultiTurnAgentExecutor(Framed), engine, "qq")
    assert Framed.given == [{"observation": "qq", "label": "gold"}]
    assert engine.prompts == [TOK.encode("xqqy")] and trajectory.prompt_length == 4
    engine = ScriptedEngine([[A, EOS]])
    one(MultiTurnAgentExecutor(Framed), engine, "qq", max_length=5, sampling=SamplingParams(max_tokens=2))
    assert engine.prompts == [TOK.encode("qqy")]  # cut on the left: 5 less 2 for the answer


def test_plain_functions_and_async_initialisers_work() -> None:
    class Old(AgentInstanceBase):
        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
            self.ready = True

        def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return states

        def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            return step(float(self.ready), done=True)

    assert one(MultiTurnAgentExecutor(Old), ScriptedEngine([[A, EOS]])).reward == 1.0


def test_stop_strings_are_left_out_of_the_action_text() -> None:
    executor, cls = scripted(step(1.0, done=True))
    engine = ScriptedEngine([([A, C, B], "stop")])
    one(executor, engine, sampling=SamplingParams(stop=("c",)))
    assert cls.seen[0]["action_text"] == "a"


def test_versions_follow_the_turns() -> None:
    executor, _ = scripted(step(0.0, "c"), step(1.0, done=True))
    replies = [GenerationResult([A, A], None, "stop", 5), GenerationResult([A, A], None, "stop", [5, 6])]
    trajectory = one(executor, ScriptedEngine(replies), sampling=SamplingParams())
    assert trajectory.weight_version.tolist() == [-1, 5, 5, -1, 5, 6]
