"""The soft zone before a length limit is the same for a response and for an agent's turn of the same limit."""

from __future__ import annotations

import pytest
from agent_cases import TOK, A, play, scripted, step
from rollout_helpers import EOS, ScriptedEngine

from openrlhf.config import PPOConfig
from openrlhf.rollout.agents import AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.experience import sample_metrics, shaped_rewards

CONFIG = {"max_new_tokens": 20, "max_len": 100, "overlong_buffer_len": 5.0, "overlong_penalty_factor": 1.0}


def limited() -> MultiTurnAgentExecutor:
    executor, cls = scripted(step(done=True))
    return MultiTurnAgentExecutor(cls, max_turn_tokens=20)


def sampled(executor: AgentExecutorBase | None, tokens: int) -> Trajectory:
    engine = ScriptedEngine([[A] * 19 + [EOS] if tokens == 20 else [*[A] * (tokens - 1), EOS]])
    if tokens > 20:
        engine = ScriptedEngine([[A] * tokens])
    sampling = SamplingParams(max_tokens=20, logprobs=True)
    (trajectory,) = play(executor, engine, max_length=100, sampling=sampling).trajectories  # type: ignore[arg-type]
    object.__setattr__(trajectory, "reward", 0.0)
    return trajectory


@pytest.mark.parametrize("kind", ["no agent", "single turn", "turns of 20 tokens"])
def test_zone_before_a_limit_of_20_tokens(kind: str) -> None:
    executors = {"no agent": None, "single turn": SingleTurnAgentExecutor(), "turns of 20 tokens": limited()}
    cfg = PPOConfig(agent_func_path=None if kind == "no agent" else "agent.py", **CONFIG)  # type: ignore[arg-type]
    samples = [sampled(executors[kind], tokens) for tokens in (15, 18, 20, 99)]
    assert [t.response_length for t in samples] == [15, 18, 20, 20]
    assert shaped_rewards(samples, cfg).tolist() == pytest.approx([0.0, -0.6, -1.0, -1.0])
    assert sample_metrics(samples, cfg)["response_clip_ratio"] == 0.5


def test_a_turn_with_all_the_room_has_the_limit_of_the_episode() -> None:
    executor, _ = scripted(step(done=True))
    sample = sampled(executor, 18)
    assert sample.turn_limit is None and sample.room(None, 100) == 100 - 18 - len(TOK.encode("q"))
