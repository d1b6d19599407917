"""Executors of users: what they return, what they may leave out, and how their files are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_cases import AB, TOK, A, B, C, Scripted, one, user_executor
from rollout_helpers import EOS, ScriptedEngine

from openrlhf.rollout.agents import MultiTurnAgentExecutor
from openrlhf.rollout.errors import AgentError
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor


@pytest.mark.parametrize("images", ["", ", images=None", ", images", ", **kwargs"])
def test_executors_of_both_releases_run(tmp_path: Path, images: str) -> None:
    trajectory = one(user_executor(tmp_path, images=images), ScriptedEngine([[A, B, C, EOS]]))
    assert trajectory.token_ids.tolist() == [*TOK.encode("q"), A, B]
    assert (trajectory.reward, trajectory.score, trajectory.extra_logs) == (0.5, 0.25, {"length": 2.0})
    assert trajectory.truncated  # not reported by this executor: the engine's finish reason says so
    assert trajectory.weight_version.tolist() == [-1, 3, 3]


def test_log_probs_that_an_executor_forgot_come_from_the_engine(tmp_path: Path) -> None:
    trajectory = one(user_executor(tmp_path, body="logprobs = None"), ScriptedEngine([[A, EOS]]))
    assert trajectory.logprobs is not None
    np.testing.assert_allclose(trajectory.logprobs, [0, -0.5, -0.51])
    executor = user_executor(tmp_path, logprobs="None")
    assert one(executor, ScriptedEngine([[A, EOS]]), sampling=SamplingParams()).logprobs is None


def test_log_probs_are_recorded_even_if_an_agent_switches_them_off() -> None:
    class Quiet(AgentExecutorBase):
        async def execute(self, sampling_params: Any, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            sampling_params.logprobs = None
            output = (await llm_engine.generate([A], sampling_params)).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 3)]}

    trajectory = one(Quiet(), ScriptedEngine([[A, EOS]]))
    assert trajectory.logprobs is not None and trajectory.logprobs[1] == -0.5


def test_ids_that_were_not_sampled_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "out.token_ids = hf_tokenizer.encode(out.text)"
    executor = user_executor(tmp_path, logprobs="None", body=body)
    trajectory = one(executor, ScriptedEngine([[A, B]]), sampling=SamplingParams())
    assert trajectory.token_ids.tolist()[-1] == AB
    assert trajectory.metadata["unsampled_action_ranges"] == 1
    assert "did not sample" in caplog.text


def test_a_vllm_like_options_object_is_understood() -> None:
    class Options:
        __struct_fields__ = (
            "temperature",
            "top_k",
            "max_tokens",
            "logprobs",
            "bad_words",
            "output_kind",
            "_x",
        )

        def __init__(self, temperature: float = 1.0, bad_words: list[str] | None = None) -> None:
            self.temperature, self.top_k, self.max_tokens, self.logprobs = temperature, 0, 16, 0
            self.bad_words, self.output_kind, self._x = bad_words, 1, object()

    class Executor(AgentExecutorBase):
        async def execute(self, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            await llm_engine.generate([A], Options(0.5, ["no"]))
            output = (await llm_engine.generate([A], Options())).outputs[0]
            return {"observation_tokens": [A, *output.token_ids], "action_ranges": [(1, 2)]}

    engine = ScriptedEngine(lambda ids, sampling: ([B], "stop"))
    one(Executor(), engine)
    assert [(s.temperature, s.top_k, s.max_tokens, s.logprobs) for s in engine.sampling] == [
        (0.5, 0, 16, True),
        (1.0, 0, 16, True),
    ]
    assert [s.extra for s in engine.sampling] == [(("bad_words", ["no"]),), ()]


def test_what_was_sampled_elsewhere_counts_as_of_the_present_weights() -> None:
    class Demonstration(AgentExecutorBase):
        async def execute(self, **given: Any) -> dict[str, Any]:
            whole = {"observation_tokens": [A, B, C], "action_ranges": [(1, 3)], "rollout_log_probs": [0.0, -1.0, -1.0]}
            return {"prompt": given["prompt"], "label": given["label"], "reward": 1.0, **whole}

    trajectory = one(Demonstration(), ScriptedEngine([]), weight_version=7)
    assert trajectory.weight_version.tolist() == [-1, 7, 7]


def test_the_single_turn_executor_for_users_scores_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(q, p, l):\n    return {'rewards': len(q[0]), 'extra_logs': {'a': 1}}\n")
    trajectory = one(SingleTurnAgentExecutor(str(path)), ScriptedEngine([([A, B, EOS], "stop")]))
    assert trajectory.reward == len("qab<eos>") and trajectory.extra_logs == {"a": 1.0}
    assert trajectory.logprobs is not None and trajectory.logprobs[1] == -0.5
    assert one(SingleTurnAgentExecutor(), ScriptedEngine([([A, EOS], "stop")])).reward is None


IMPORT = "from openrlhf.utils.agent import *\n"


BASE = IMPORT + "class AgentExecutor(AgentExecutorBase):\n    "


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\n", "defines no class AgentExecutor. Define `class AgentExecutor"),
        ("async def step(s, a, l): ...\n", "interface of releases before 0.9.1"),
        ("class AgentExecutor: ...\n", "not a subclass of AgentExecutorBase"),
        ("AgentExecutor = 3\n", "not a subclass of AgentExecutorBase"),
        (BASE + "x = 1\n", r"AgentExecutor lacks \['execute'\]"),
        (BASE + "def execute(self, **k): ...\n", "execute must be `async def`"),
        (BASE + "async def execute(self, prompt): ...\n", "can't be called with the keywords prompt, label"),
        (
            BASE + "async def __init__(self): ...\n    async def execute(self, **k): ...\n",
            "has an `async def __init__`, which Python can't call",
        ),
        (
            BASE + "def __init__(self, url): ...\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised TypeError: .*missing 1 required positional argument: 'url'",
        ),
        (
            BASE + "def __init__(self):\n        raise OSError('x')\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised OSError: x at .*my_agent.py:4",
        ),
        (
            BASE + "def __init__(self):\n        raise SystemExit(2)\n    async def execute(self, **k): ...\n",
            r"AgentExecutor\(\) raised SystemExit: 2 at .*my_agent.py:4",
        ),
        ("import nothing_of_this_name\n", r"ModuleNotFoundError.*\(at .*my_agent.py:1\)"),
    ],
)
def test_unusable_agent_files_are_named(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "my_agent.py"
    path.write_text(code)
    with pytest.raises(AgentError, match=words):
        load_agent_executor(str(path))


def test_the_instance_class_is_checked() -> None:
    with pytest.raises(TypeError, match="needs a subclass of AgentInstanceBase"):
        MultiTurnAgentExecutor(Scripted())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs a subclass of AgentInstanceBase"):
        MultiTurnAgentExecutor(dict)  # type: ignore[arg-type]
