"""Agents and executors for the tests of them, and how they play an episode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollout_helpers import LetterTokenizer, ScriptedEngine, item

from openrlhf.rollout.agents import MultiTurnAgentExecutor
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.group import Group
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase

TOK = LetterTokenizer()


A, B, C, AB = (TOK.ids[piece] for piece in ("a", "b", "c", "ab"))


def spec(executor: AgentExecutorBase, **options: Any) -> EpisodeSpec:
    sampling = options.pop("sampling", SamplingParams(logprobs=True))
    max_length = options.pop("max_length", 32)
    return EpisodeSpec(sampling=sampling, max_length=max_length, tokenizer=TOK, executor=executor, **options)


def play(executor: AgentExecutorBase, engine: ScriptedEngine, text: str = "q", n: int = 1, **options: Any) -> Group:
    return asyncio.run(run_group(item(TOK, text, 4, label="gold"), n, engine, spec(executor, **options)))


def one(executor: AgentExecutorBase, engine: ScriptedEngine, text: str = "q", **options: Any) -> Trajectory:
    return play(executor, engine, text, **options).trajectories[0]


class Scripted(AgentInstanceBase):
    """Answers with the scripted step results, and keeps what it was given."""

    steps: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.turn = 0

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        type(self).seen.append(dict(state_dict))
        result = type(self).steps[self.turn]
        self.turn += 1
        return result


def scripted(*steps: dict[str, Any]) -> tuple[MultiTurnAgentExecutor, type[Scripted]]:
    cls = type("Scripted", (Scripted,), {"steps": list(steps), "seen": []})
    return MultiTurnAgentExecutor(cls), cls


def step(rewards: Any = 0.0, feedback: str = "", done: Any = False, **more: Any) -> dict[str, Any]:
    return {"rewards": rewards, "environment_feedback": feedback, "done": done, **more}


OLD_STYLE = """
import copy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine{images}):
        ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
        params = copy.deepcopy(sampling_params)
        params.max_tokens = 2
        out = (await llm_engine.generate(ids, params)).outputs[0]
        logprobs = None
        if out.logprobs is not None:
            logprobs = [0.0] * len(ids) + [d[t].logprob for t, d in zip(out.token_ids, out.logprobs)]
        assert params.top_p == 1.0 and params.top_k == -1 and params.min_tokens == 1
        assert params.skip_special_tokens is False and params.logprobs == {logprobs}
        {body}
        return {{"prompt": prompt, "label": label, "observation_tokens": ids + out.token_ids,
                "action_ranges": [(len(ids), len(ids) + len(out.token_ids))], "rollout_log_probs": logprobs,
                "reward": 0.5, "scores": 0.25, "extra_logs": {{"length": len(out.text)}}}}
"""


def user_executor(tmp_path: Path, *, images: str = "", logprobs: str = "1", body: str = "pass") -> AgentExecutorBase:
    path = tmp_path / "my_agent.py"
    path.write_text(OLD_STYLE.format(images=images, logprobs=logprobs, body=body))
    return load_agent_executor(str(path))
