"""What agents show the policy and does not fit into --max_len: cut and counted, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from agent_cases import TOK, A, one, scripted, step
from rollout_helpers import EOS, ScriptedEngine

from openrlhf.rollout.agent_output import warn_of_cut
from openrlhf.rollout.errors import AgentError
from openrlhf.rollout.metrics import rollout_metrics
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils.agent import AgentExecutorBase


class Talkative(AgentExecutorBase):
    """Samples once, and puts x behind that, or before it."""

    def __init__(self, behind: int, moved: int = 0) -> None:
        self.behind, self.moved = behind, moved

    async def execute(self, prompt: str, sampling_params: Any, llm_engine: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        ids = llm_engine.prompt_token_ids
        sampled = (await llm_engine.generate(ids, sampling_params)).outputs[0].token_ids
        ids = ids + TOK.encode("x" * self.moved)
        ranges = [(len(ids), len(ids) + len(sampled))]
        tokens = ids + sampled + TOK.encode("x" * self.behind)
        logprobs = [0.0] * len(ids) + [-0.5, -0.25] + [0.0] * self.behind
        return {"observation_tokens": tokens, "action_ranges": ranges, "rollout_log_probs": logprobs, "reward": 1.0}


def test_what_is_behind_the_last_action_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_cut.cache_clear()
    with caplog.at_level(logging.WARNING):
        samples = [one(Talkative(n), ScriptedEngine([[A, EOS]]), max_length=16) for n in (13, 14, 500)]
    assert [t.total_length for t in samples] == [16, 16, 16]
    assert [t.metadata.get("cut_observation_tokens") for t in samples] == [None, 1, 487]
    for t in samples:
        assert t.token_ids.tolist() == [*TOK.encode("q"), A, EOS, *TOK.encode("x" * 13)]
        assert t.logprobs is not None and t.logprobs.tolist() == [0, -0.5, -0.25, *[0] * 13]
    assert caplog.text.count("behind the last action is beyond the limit") == 1
    metrics = rollout_metrics(samples, max_new_tokens=None, max_len=16)
    assert metrics["rollout/cut_observations_rate"] == pytest.approx(2 / 3)
    assert "rollout/cut_observations_rate" not in rollout_metrics(samples[:1], max_new_tokens=None, max_len=16)


def test_actions_beyond_the_limit_are_refused() -> None:
    engine = ScriptedEngine([[A, EOS]])
    assert one(Talkative(0, moved=13), engine, max_length=16).total_length == 16
    with pytest.raises(AgentError, match=r"17 tokens, the last action ends at 17, and --max_len is 16"):
        one(Talkative(0, moved=14), ScriptedEngine([[A, EOS]]), max_length=16)


def test_observations_of_reset_that_are_cut_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_cut.cache_clear()
    executor, cls = scripted(step(done=True))

    async def reset(self: Any, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"observation": "0123456789" + states["observation"]}

    cls.reset = reset  # type: ignore[method-assign]
    for _ in range(2):
        engine = ScriptedEngine([[A, EOS]])
        sample = one(executor, engine, max_length=12, sampling=SamplingParams(max_tokens=4, logprobs=True))
        assert engine.prompts == [TOK.encode("3456789q")]
        assert sample.metadata["cut_observation_tokens"] == 3
    assert caplog.text.count("returned from reset() is beyond the limit") == 1


def test_feedback_that_is_cut_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_cut.cache_clear()
    for done in (True, False):
        executor, _ = scripted(step(0.5, "x" * 6, done), step(done=True))
        sample = one(executor, ScriptedEngine([[A, EOS]]), max_length=8)
        assert sample.token_ids.tolist() == [*TOK.encode("q"), A, EOS, *TOK.encode("x" * 5)]
        assert sample.metadata["cut_observation_tokens"] == 1 and sample.truncated != done
    executor, _ = scripted(step(0.5, "x" * 5, done=True))
    assert "cut_observation_tokens" not in one(executor, ScriptedEngine([[A, EOS]]), max_length=8).metadata
    assert caplog.text.count("returned from step() is beyond the limit") == 1
