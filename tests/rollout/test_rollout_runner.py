"""The rollout runner: order, concurrency, deadlines, failures."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.rollout.agents import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.rollout.episodes import EpisodeSpec, Group, PromptItem
from openrlhf.rollout.errors import AgentError, RolloutTimeout
from openrlhf.rollout.protocol import GenerationResult, SamplingParams
from openrlhf.rollout.runner import LeastLoaded, RolloutRunner

TOK = LetterTokenizer()


def spec(**options: Any) -> EpisodeSpec:
    return EpisodeSpec(sampling=SamplingParams(max_tokens=4), max_length=16, tokenizer=TOK, **options)


def prompts(count: int) -> list[PromptItem]:
    return [item(TOK, "abcdefghij"[i], i, label=i) for i in range(count)]


def answer(ids: list[int], sampling: SamplingParams) -> list[int]:
    return [14, EOS]


class ReverseEngine:
    """Answers the first request last."""

    def __init__(self) -> None:
        self.running = self.most = self.count = 0

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> GenerationResult:
        self.running += 1
        self.most = max(self.most, self.running)
        self.count += 1
        await asyncio.sleep(0.2 / self.count)
        self.running -= 1
        return GenerationResult([14, EOS], None, "stop", 0)


def test_groups_come_as_they_finish_and_collect_restores_the_order() -> None:
    async def run() -> None:
        runner = RolloutRunner(LeastLoaded([ReverseEngine()]), spec())
        finished = [group.item.prompt_id async for group in runner.run(prompts(4), 2)]
        assert finished == [3, 2, 1, 0]
        runner = RolloutRunner(LeastLoaded([ReverseEngine()]), spec())
        groups = await runner.collect(prompts(4), 2)
        assert [g.item.prompt_id for g in groups] == [0, 1, 2, 3]
        assert [[t.metadata["label"] for t in g.trajectories] for g in groups] == [[i, i] for i in range(4)]
        assert runner.pop_metrics()["rollout/groups"] == 4 and runner.pop_metrics()["rollout/groups"] == 0

    asyncio.run(run())


def test_concurrency_is_bounded_and_load_is_shared() -> None:
    async def run() -> None:
        engines = [ReverseEngine(), ReverseEngine()]
        runner = RolloutRunner(LeastLoaded(engines), spec(), max_concurrent_groups=4)
        groups = await runner.collect(prompts(10), 3)
        assert sum(len(g.trajectories) for g in groups) == 30
        assert [engine.most for engine in engines] == [6, 6]
        assert engines[0].count + engines[1].count == 30 and min(e.count for e in engines) >= 9

    asyncio.run(run())


class FifthFails(AgentInstanceBase):
    """Raises or hangs on prompt "f"."""

    how = "raise"

    def __init__(self) -> None: ...

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        if state_dict["label"] == 5:
            if self.how == "hang":
                await asyncio.sleep(60)
            raise KeyError("tool")
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


class FifthHangs(FifthFails):
    how = "hang"


def runner_for(agent: type[AgentInstanceBase], timeout: float = 30.0, **options: Any) -> RolloutRunner:
    on_timeout = options.pop("on_timeout", "raise")
    episodes = spec(executor=MultiTurnAgentExecutor(agent), **options)
    engine = ScriptedEngine(answer)
    return RolloutRunner(LeastLoaded([engine]), episodes, timeout=timeout, on_timeout=on_timeout)


def used(groups: list[Group]) -> list[int]:
    return [group.item.prompt_id for group in groups if group.trajectories]


def test_a_failing_agent_stops_the_run_with_prompt_and_place() -> None:
    with pytest.raises(
        AgentError, match=r"prompt 5 sample 0: .* raised KeyError: 'tool' at .*test_rollout_runner.py:\d+"
    ):
        asyncio.run(runner_for(FifthFails).collect(prompts(8), 1))


@pytest.mark.parametrize("agent", [FifthFails, FifthHangs])
def test_a_failing_agent_may_be_left_out(agent: type[AgentInstanceBase]) -> None:
    runner = runner_for(agent, on_agent_failure="drop", episode_timeout=0.3)
    groups = asyncio.run(runner.collect(prompts(8), 1))
    assert used(groups) == [0, 1, 2, 3, 4, 6, 7]
    metrics = runner.pop_metrics()
    assert metrics["rollout/failures"] == 1
    kind = "agent" if agent is FifthFails else "timeout"
    assert metrics[f"rollout/failures_{kind}"] == 1


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_the_deadline_holds_without_an_episode_limit(policy: str) -> None:
    runner = runner_for(FifthHangs, timeout=0.5, episode_timeout=None, on_timeout=policy)
    started = time.monotonic()
    if policy == "raise":
        words = r"did not end within 0.5 s: 7 groups done, 1 unfinished \(prompt ids 5; 1 of them running\)"
        with pytest.raises(RolloutTimeout, match=words):
            asyncio.run(runner.collect(prompts(8), 1))
    else:
        groups = asyncio.run(runner.collect(prompts(8), 1))
        assert used(groups) == [0, 1, 2, 3, 4, 6, 7] and len(groups) == 8
        assert runner.pop_metrics()["rollout/failures_deadline"] == 1
    assert time.monotonic() - started < 8


def test_leaving_the_iteration_cancels_what_runs() -> None:
    async def run() -> int:
        runner = runner_for(FifthHangs, episode_timeout=None)
        groups = runner.run(prompts(8), 1)
        await anext(groups)
        await groups.aclose()
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(run()) == 0


def test_loads_return_to_zero_after_a_failure() -> None:
    async def run() -> None:
        chooser = LeastLoaded([ScriptedEngine([RuntimeError("x")]), ScriptedEngine(answer)])
        runner = RolloutRunner(chooser, spec())
        with pytest.raises(Exception, match="generation engine failed"):
            await runner.collect(prompts(2), 1)
        assert chooser._load == [0, 0]

    asyncio.run(run())


def test_unusable_arguments_are_refused() -> None:
    runner = RolloutRunner(LeastLoaded([ScriptedEngine(answer)]), spec())
    with pytest.raises(ValueError, match="at least one sample, got n=0"):
        asyncio.run(runner.collect(prompts(1), 0))
    with pytest.raises(ValueError, match="share a group_id"):
        asyncio.run(runner.collect(prompts(1) * 2, 1))
    with pytest.raises(ValueError, match="at least one generation engine"):
        LeastLoaded([])
    with pytest.raises(ValueError, match="on_timeout must be"):
        RolloutRunner(LeastLoaded([ScriptedEngine(answer)]), spec(), on_timeout="wait")
    with pytest.raises(ValueError, match="max_concurrent_groups"):
        RolloutRunner(LeastLoaded([ScriptedEngine(answer)]), spec(), max_concurrent_groups=0)
