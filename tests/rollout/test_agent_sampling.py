"""The sampling options that agents see, against those of vLLM."""

from __future__ import annotations

import pytest

from openrlhf.rollout.agent_engine import _VLLM_DEFAULTS, AgentSamplingParams, to_sampling
from openrlhf.rollout.protocol import SamplingParams


def test_options_of_vllm_that_nobody_set_have_its_defaults() -> None:
    params = AgentSamplingParams.from_sampling(SamplingParams(temperature=0.5))
    assert (params.n, params.presence_penalty, params.detokenize, params.logit_bias) == (1, 0.0, True, None)
    assert to_sampling(params).extra == ()
    params.bad_words.append("no")
    other = params.clone()
    other.bad_words.append("never")
    other.frequency_penalty = 0.25
    other.detokenize = True  # the engine's business
    assert to_sampling(params).extra == (("bad_words", ["no"]),)
    assert dict(to_sampling(other).extra) == {"bad_words": ["no", "never"], "frequency_penalty": 0.25}
    assert AgentSamplingParams.from_sampling(SamplingParams()).bad_words == []
    with pytest.raises(AttributeError, match="sampling_params has no 'temprature'; it has temperature, top_p"):
        params.temprature  # noqa: B018


@pytest.mark.slow
def test_vllm_sampling_params_are_understood() -> None:
    vllm = pytest.importorskip("vllm")
    defaults = vllm.SamplingParams()
    assert {name: getattr(defaults, name) for name in _VLLM_DEFAULTS} == _VLLM_DEFAULTS
    plain = to_sampling(vllm.SamplingParams())
    assert (plain.temperature, plain.top_p, plain.top_k, plain.extra) == (1.0, 1.0, 0, ())
    given = vllm.SamplingParams(temperature=0.5, stop="x", logprobs=1, seed=3, bad_words=["a"], max_tokens=7)
    read = to_sampling(given)
    assert (read.temperature, read.stop, read.logprobs, read.seed, read.max_tokens) == (0.5, ("x",), True, 3, 7)
    assert dict(read.extra)["bad_words"] == ["a"] and "n" not in dict(read.extra)
