"""Agent code that fails, hangs or breaks the contract is named, and costs no other sample."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_cases import A, Scripted, one, play, scripted, step, user_executor
from rollout_helpers import EOS, ScriptedEngine

from openrlhf.rollout.agents import MultiTurnAgentExecutor
from openrlhf.rollout.errors import AgentError, EngineError, EpisodeTimeout
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils.agent import AgentExecutorBase

OK = "return {'observation_tokens': [1], 'action_ranges': [(0, 1)], 'rollout_log_probs': [0]"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 3", r"returned int, not a dict. Return"),
        ("return []", "returned list, not a dict"),
        ("return {'reward': 1}", r"without \['observation_tokens', 'action_ranges'\] \(keys: \['reward'\]\)"),
        ("ids = [1.5]", r"observation_tokens\[0\] is 1.5, not a token id"),
        ("return {'observation_tokens': [], 'action_ranges': []}", "observation_tokens is empty"),
        ("return {'observation_tokens': [1], 'action_ranges': []}", "no action tokens"),
        (
            "return {'observation_tokens': [1], 'action_ranges': [(0, 2)]}",
            r"\(0, 2\) is outside the 1 tokens",
        ),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [(0, 2), (1, 2)]}",
            "overlaps the one before",
        ),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [3]}",
            r"holds 3; each entry is \(start, end\)",
        ),
        ("logprobs = [0.0]", "rollout_log_probs has 1 entries, observation_tokens has 3"),
        ("logprobs[1] = float('nan')", r"rollout_log_probs\[1\] is nan"),
        (
            "return {'observation_tokens': [1, 2], 'action_ranges': [(0, 2)]}",
            "rollout_log_probs is None, but training needs",
        ),
        (
            OK + ", 'reward': 'x'}",
            "\"reward\" is 'x'; it must be one finite number",
        ),
        (
            OK + ", 'extra_logs': 1}",
            '"extra_logs" is a int',
        ),
        (
            OK + ", 'extra_logs': {'a': []}}",
            r"extra_logs\['a'\] is \[\], not a number",
        ),
        (
            OK + ", 'step_rewards': [1]}",
            '"step_rewards" must be',
        ),
    ],
)
def test_outputs_that_break_the_contract_are_named(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(AgentError, match=words) as caught:
        one(user_executor(tmp_path, body=body), ScriptedEngine([[A, EOS]]))
    assert "prompt 4 sample 0: AgentExecutor.execute()" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, r"step\(\) returned NoneType, not a dict. Return"),
        ({"rewards": 1.0}, r"without \['environment_feedback', 'done'\] \(keys: \['rewards'\]\)"),
        (step("1"), "\"rewards\" = '1'; it must be one finite number"),
        (step(float("nan")), '"rewards" = nan'),
        (step(torch.ones(2)), '"rewards" = tensor'),
        (step([torch.ones(2)]), r'"rewards" = \[tensor'),
        (step([torch.ones(0)]), r'"rewards" = \[tensor\(\[\]\)\]; it must be one finite number'),
        ({**step(), "environment_feedback": 3}, '"environment_feedback" of type int; it must be text'),
    ],
)
def test_steps_that_break_the_contract_are_named(result: Any, words: str) -> None:
    executor, _ = scripted(result)
    with pytest.raises(AgentError, match=words) as caught:
        one(executor, ScriptedEngine([[A, EOS]]))
    assert "prompt 4 sample 0: Scripted.step()" in str(caught.value)


def test_a_reset_without_observation_is_named() -> None:
    class NoText(Scripted):
        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            return {"text": "x"}

    with pytest.raises(AgentError, match=r"NoText.reset\(\) returned a dict with \['text'\]; return a dict with"):
        one(MultiTurnAgentExecutor(NoText), ScriptedEngine([]))


def test_exceptions_of_agent_code_name_file_line_and_sample(tmp_path: Path) -> None:
    with pytest.raises(AgentError) as caught:
        one(user_executor(tmp_path, body="{}['x']"), ScriptedEngine([[A, EOS]]))
    message = str(caught.value)
    assert message == (f"prompt 4 sample 0: AgentExecutor.execute() raised KeyError: 'x' at {tmp_path}/my_agent.py:16")
    with pytest.raises(AgentError, match=r"raised RuntimeError: user code called sys.exit\(2\) at .*my_agent.py:16"):
        one(user_executor(tmp_path, body="raise SystemExit(2)"), ScriptedEngine([[A, EOS]]))


def test_one_failing_sample_can_be_dropped_and_counted() -> None:
    class Fragile(Scripted):
        steps = [step(1.0, done=True)]
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Fragile.made += 1
            if Fragile.made == 2:
                raise OSError("no sandbox")

    group = play(MultiTurnAgentExecutor(Fragile), ScriptedEngine(lambda i, s: [A, EOS]), n=3, on_agent_failure="drop")
    assert [t.sample_index for t in group.trajectories] == [0, 2]
    assert [(f.sample_index, f.kind) for f in group.failures] == [(1, "agent")]
    assert "OSError: no sandbox at" in group.failures[0].message


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_agent_that_hangs_ends_in_time(policy: str) -> None:
    class Hangs(Scripted):
        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(1)  # and it takes its time to go
            return step()

    executor, engine = MultiTurnAgentExecutor(Hangs), ScriptedEngine([[A, EOS]])
    started = time.monotonic()
    if policy == "raise":
        with pytest.raises(EpisodeTimeout, match="prompt 4 sample 0: agent MultiTurnAgentExecutor.*did not end"):
            play(executor, engine, episode_timeout=0.1)
    else:
        group = play(executor, engine, episode_timeout=0.1, on_agent_failure="drop")
        assert [f.kind for f in group.failures] == ["timeout"]
    assert time.monotonic() - started < 30


def test_engine_trouble_is_not_blamed_on_the_agent(tmp_path: Path) -> None:
    executor, _ = scripted(step(1.0, done=True))
    with pytest.raises(EngineError, match="generation engine failed: RuntimeError: gone"):
        play(executor, ScriptedEngine([RuntimeError("gone")]), on_agent_failure="drop")
    wrapped = user_executor(tmp_path, images=", **kwargs")

    class Hides(AgentExecutorBase):
        async def execute(self, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            try:
                return await wrapped.execute(**kwargs)
            except Exception as error:
                raise ValueError("something") from error

    with pytest.raises(EngineError, match="gone"):
        play(Hides(), ScriptedEngine([RuntimeError("gone")]), on_agent_failure="drop")


def test_an_agent_may_try_a_failed_request_again() -> None:
    class Stubborn(AgentExecutorBase):
        async def execute(self, sampling_params: Any, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            with pytest.raises(EngineError, match="gone"):
                await llm_engine.generate([A], sampling_params)
            output = (await llm_engine.generate([A], sampling_params)).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 3)]}

    assert one(Stubborn(), ScriptedEngine([RuntimeError("gone"), [A, EOS]])).response_length == 2


def test_wrong_arguments_to_generate_are_named() -> None:
    class Calls(AgentExecutorBase):
        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        async def execute(self, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            options = self.arguments[1:] or (kwargs["sampling_params"],)
            return await llm_engine.generate(self.arguments[0], *options)

    with pytest.raises(AgentError, match="wants a list of token ids first, got str"):
        one(Calls("text"), ScriptedEngine([]))
    with pytest.raises(AgentError, match="sampling_params are not usable: .*temperature -1"):
        one(Calls([1], {"temperature": -1}), ScriptedEngine([]))
    with pytest.raises(AgentError, match="sampling_params.n must be 1"):
        one(Calls([1], {"n": 2}), ScriptedEngine([]))
    with pytest.raises(AgentError, match="multi_modal_data has images, but --max_images_per_prompt is 0"):
        one(Calls([1], SamplingParams(), {"image": 1}), ScriptedEngine([]))
