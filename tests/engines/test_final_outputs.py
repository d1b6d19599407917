"""What the front end of an engine is told of a response: once, everything, and nothing under another version's name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import AsyncEngineArgs
from vllm import SamplingParams as VLLMSampling
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from openrlhf.engines import final_outputs
from openrlhf.engines.final_outputs import LOGPROBS, AsyncFinalOutputs, FinalOutputs, make_scheduler, wants_one_output
from openrlhf.engines.spec import engine_environment, model_arguments
from openrlhf.engines.stop_strings import STOP_STRINGS
from openrlhf.engines.vllm_engine import VLLMEngine, _sampled_logprobs
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils.tiny_model import make_tiny_model


def request(name: str, client: int = 0, resumable: bool = False, **options: Any) -> Any:
    sampling = VLLMSampling(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, **options)
    fields = {"num_prompt_tokens": 4, "max_tokens": 8, "use_structured_output": False, "lora_request": None}
    return SimpleNamespace(
        request_id=name, client_index=client, sampling_params=sampling, resumable=resumable, **fields
    )


def output(name: str, *token_ids: int, ends: bool = False, logprob: float | None = None, **more: Any) -> Any:
    made = None
    if logprob is not None:  # the sampled token is first, others may follow
        rows = len(token_ids)
        made = LogprobsLists(np.zeros((rows, 2)), np.full((rows, 2), [logprob, -9.0]), np.zeros(rows))
    reason = FinishReason.LENGTH if ends else None
    return EngineCoreOutput(name, list(token_ids), finish_reason=reason, new_logprobs=made, **more)


class Steps:
    """A scheduler whose steps are written down: what vLLM's own would have sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *requests: Any) -> None:
        monkeypatch.setattr(Scheduler, "add_request", lambda _, request: None)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda _, scheduled, sent: sent)
        monkeypatch.setattr(Scheduler, "has_requests", lambda _: False)
        self.scheduler = FinalOutputs.__new__(FinalOutputs)
        self.scheduler._kept, self.scheduler._watches, self.scheduler._pause_state = {}, {}, PauseState.UNPAUSED
        self.scheduler._special, self.scheduler.max_model_len = set(), 64
        self.scheduler._plain = False  # vLLM makes an output of every token
        self.scheduler.requests = {made.request_id: made for made in requests}
        for made in requests:
            self.scheduler.add_request(made)

    def __call__(self, *outputs: Any, client: int = 0, **more: Any) -> dict[int, EngineCoreOutputs]:
        sent = {client: EngineCoreOutputs(outputs=list(outputs), **more)} if outputs or more else {}
        return self.scheduler.update_from_output(None, sent)  # type: ignore[arg-type]


def test_a_response_is_sent_when_it_ends_with_all_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps(monkeypatch, request("a", logprobs=0), request("b"))
    stats, prompt = PrefillStats(), object()
    first = output("a", 1, logprob=-0.5, prefill_stats=stats, new_prompt_logprobs_tensors=prompt)
    assert step(first, output("b", 7)) == {}
    assert step(output("a", 2, logprob=-1.0), output("b", 8)) == {}
    (whole,) = step(output("a", 3, ends=True, logprob=-2.0), output("b", 9))[0].outputs
    assert whole.new_token_ids == [1, 2, 3] and whole.finish_reason == FinishReason.LENGTH
    assert whole.kv_transfer_params == {LOGPROBS: [-0.5, -1.0, -2.0]} and whole.new_logprobs is None
    assert whole.prefill_stats is stats and whole.new_prompt_logprobs_tensors is prompt
    (other,) = step(output("b", 10, ends=True))[0].outputs
    assert other.new_token_ids == [7, 8, 9, 10] and other.kv_transfer_params is None
    assert not step.scheduler._kept


def test_what_waits_is_sent_before_a_pause_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps(monkeypatch, request("a", logprobs=0), request("b", client=1))
    step(output("a", 1, logprob=-0.5))
    assert not step.scheduler.has_requests()
    step.scheduler._pause_state = PauseState.PAUSED_ALL
    assert step.scheduler.has_requests()  # or the core would not take the step that sends
    sent = step(output("b", 7), client=1)  # the step that was on its way
    assert [o.new_token_ids for o in sent[0].outputs] == [[1]] and [o.new_token_ids for o in sent[1].outputs] == [[7]]
    assert not sent[0].outputs[0].finished and not step.scheduler.has_requests() and step() == {}
    step.scheduler._pause_state = PauseState.UNPAUSED
    assert step(output("a", 2, logprob=-1.0)) == {}
    (whole,) = step(output("a", 3, ends=True, logprob=-2.0))[0].outputs
    # The tokens that were sent are not sent again. Log-probs are, since only an end has them.
    assert whole.new_token_ids == [2, 3] and whole.kv_transfer_params == {LOGPROBS: [-0.5, -1.0, -2.0]}


def test_what_an_aborted_request_had_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps(monkeypatch, request("a"), request("b"))
    step(output("a", 1), output("b", 7))
    monkeypatch.setattr(Scheduler, "finish_requests", lambda _, ids, status: [request(name) for name in ids])
    assert [r.request_id for r in step.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)] == ["a"]
    assert list(step.scheduler._kept) == ["b"]


def test_steps_that_tell_something_else_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Steps(monkeypatch, request("a"))
    assert step(output("a", 1), finished_requests={"z"})[0].finished_requests == {"z"}
    assert len(step(output("not ours", 5))[0].outputs) == 1


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({}, True),
        ({"logprobs": 0}, True),
        ({"stop_token_ids": [3]}, True),
        ({"logprobs": 2}, False),
        ({"prompt_logprobs": 0}, True),
        ({"resumable": True}, False),
    ],
)
def test_requests_that_look_at_more_than_their_end_are_served_token_by_token(
    options: dict[str, Any], once: bool
) -> None:
    assert wants_one_output(request("a", **options)) == once


def test_streams_and_stop_strings_of_the_front_end_are_served_token_by_token() -> None:
    made = request("a")
    made.sampling_params = VLLMSampling(output_kind=RequestOutputKind.FINAL_ONLY, stop=["x"])
    assert not wants_one_output(made)
    made.sampling_params = VLLMSampling(output_kind=RequestOutputKind.DELTA, detokenize=False)
    assert not wants_one_output(made)


@pytest.mark.parametrize(("ahead", "kind"), [(True, AsyncFinalOutputs), (False, FinalOutputs)])
def test_the_scheduler_is_of_the_kind_that_vllm_chose(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, kind: type[Any]
) -> None:
    monkeypatch.setattr(final_outputs.DecodeSteps, "__init__", lambda self, **arguments: None)
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self, **arguments: None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    assert type(make_scheduler(vllm_config=config)) is kind
    assert AsyncFinalOutputs.__mro__.index(FinalOutputs) < AsyncFinalOutputs.__mro__.index(AsyncScheduler)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in engine_environment(on_cpu=True, full_determinism=False).items():
        monkeypatch.setenv(name, value)
    yield


def test_an_engine_sends_little_and_says_the_same(tmp_path: Path, environment: None) -> None:
    """A real engine: each response at once, as token by token; and how much arrives of either."""
    counted: dict[str, int] = {}

    async def run() -> None:
        arguments = model_arguments(str(make_tiny_model(tmp_path / "model")), "fp32", 256, on_cpu=True)
        engine = VLLMEngine.__new__(VLLMEngine)
        engine._llm = llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        receive, received = llm.engine_core.get_output_async, [0]

        async def counting() -> Any:
            outputs = await receive()
            received[0] += len(outputs.outputs)
            return outputs

        llm.engine_core.get_output_async = counting

        async def ask(name: str, change: Callable[[Any], None] = lambda sampling: None, **options: Any) -> list[Any]:
            received[0] = 0

            async def one(seed: int) -> Any:
                asked = {"logprobs": True, "max_tokens": 50, "seed": seed, "ignore_eos": True} | options
                sampling = engine._vllm_sampling(SamplingParams(**asked))
                change(sampling)
                async for answer in llm.generate({"prompt_token_ids": [5, 6, 7]}, sampling, f"{name}-{seed}"):
                    last = answer
                return last

            answers = await asyncio.gather(*map(one, range(8)))
            counted[name] = received[0]
            return answers

        def as_vllm_does(sampling: Any) -> None:
            sampling.output_kind, sampling.flat_logprobs = RequestOutputKind.CUMULATIVE, True
            strings = (sampling.extra_args or {}).pop(STOP_STRINGS, None)
            if strings:
                sampling.stop, sampling.detokenize = strings, True

        try:
            each, once = await ask("each", as_vllm_does), await ask("once")
            word = llm.tokenizer.decode(once[0].outputs[0].token_ids[10:12])
            limits = {"stop": (word, word[-1] + "never"), "min_tokens": 3}
            each += await ask("each until", as_vllm_does, **limits)
            once += await ask("once until", **limits)
            for one, other in zip(once, each, strict=True):
                (mine, usual) = (answer.outputs[0] for answer in (one, other))
                assert list(mine.token_ids) == list(usual.token_ids)
                assert (mine.finish_reason, mine.stop_reason) == (usual.finish_reason, usual.stop_reason)
                flat = usual.logprobs
                expected = [flat.logprobs[start] for start in flat.start_indices]
                assert _sampled_logprobs(one) == pytest.approx(expected, abs=1e-6)
                assert len(expected) == len(mine.token_ids) and not mine.logprobs
            assert once[8].outputs[0].stop_reason == word and len(once[8].outputs[0].token_ids) <= 12
            # Beside others, and token for token, although no text is made of them.
            rule = StructuredOutputsParams(regex="(ab){12}")
            guided, _ = await asyncio.gather(
                ask("guided", ignore_eos=False, extra={"structured_outputs": rule}), ask("beside")
            )
            texts = [llm.tokenizer.decode(answer.outputs[0].token_ids, skip_special_tokens=True) for answer in guided]
            assert texts == ["ab" * 12] * 8
        finally:
            llm.shutdown()

    asyncio.run(run())
    assert counted["once"] == counted["once until"] == 8 and counted["each"] == 8 * 50
