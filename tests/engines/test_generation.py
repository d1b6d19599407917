"""Weight versions of sampled tokens, and groups in flight on several engines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from ray import cloudpickle
from vllm.outputs import CompletionOutput
from vllm.v1.engine import FinishReason

from openrlhf.cluster.group import Member, WorkerError, WorkerGroup
from openrlhf.config import PPOConfig
from openrlhf.engines import pool, vllm_engine
from openrlhf.engines.core_process import METHOD_VARIABLE, CoreStart
from openrlhf.engines.final_outputs import LOGPROBS
from openrlhf.engines.pool import EnginePool, GroupCalls
from openrlhf.engines.spec import EngineSpec, model_arguments
from openrlhf.engines.stop_strings import STOP_STRINGS
from openrlhf.engines.vllm_engine import IMAGE_TRIES, UNSYNCED, RefusedByVLLM, VLLMEngine, _token_versions
from openrlhf.rollout.group import PromptItem
from openrlhf.rollout.protocol import PlacedImage, SamplingParams
from openrlhf.utils.tiny_model import make_tiny_model


class Span(NamedTuple):
    version: str
    start: int
    end: int


@pytest.mark.parametrize(
    ("spans", "count", "versions"),
    [
        (None, 3, 0),
        ([], 0, 0),
        ([Span(UNSYNCED, 0, 4)], 4, 0),
        ([Span("7", 0, 4)], 4, 7),
        ([Span("7", 0, 2), Span("7", 2, 4)], 4, 7),
        ([Span("7", 0, 1), Span("8", 1, 3), Span("10", 3, 4)], 4, [7, 8, 8, 10]),
        ([Span("7", 0, 2), Span("8", 2, 5)], 4, [7, 7, 8, 8]),  # a stop string cut the last token
    ],
)
def test_versions_of_a_response(spans: list[Span] | None, count: int, versions: Any) -> None:
    assert _token_versions(spans, count) == versions


@dataclass
class Engine:
    """An actor handle that notes which prompts it got."""

    prompts: list[int] = field(default_factory=list)

    @property
    def run_group(self) -> Engine:
        return self

    def remote(self, prompt: PromptItem, *_: Any) -> tuple[int, int]:
        self.prompts.append(prompt.prompt_id)
        return (id(self), prompt.prompt_id)


def in_flight(engines: list[Engine], log: Path, timeout: float) -> GroupCalls:
    members = [Member(f"engine {i}", engine, str(log)) for i, engine in enumerate(engines)]  # type: ignore[arg-type]
    return GroupCalls(WorkerGroup("engine", members, 1.0), 400, SamplingParams(), timeout)


def test_prompts_go_to_the_least_loaded_engine_and_have_a_deadline_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("waiting for the judge\n")
    clock = [100.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: clock[0])
    done: list[Any] = []
    monkeypatch.setattr(pool.ray, "wait", lambda calls, num_returns, timeout: ([c for c in calls if c in done], []))
    monkeypatch.setattr(pool.PendingCall, "result", lambda self, timeout: [next(iter(self._calls))])
    first, second = Engine(), Engine()
    calls = in_flight([first, second], tmp_path / "log", timeout=60.0)
    for number in range(4):  # 400 samples each: two fill an engine
        assert calls.has_room
        calls.submit(PromptItem(number, number, "", [1]))
    assert not calls.has_room and (first.prompts, second.prompts) == ([0, 2], [1, 3])
    done.append((id(second), 1))
    assert calls.wait(1.0) == done and calls.has_room and len(calls) == 3
    clock[0] += 50
    calls.submit(PromptItem(4, 4, "", [1]))
    assert second.prompts == [1, 3, 4]
    done.clear()
    assert calls.wait(1.0) == []
    clock[0] += 20
    assert calls.wait(1.0) == []  # late for an episode; its engine says so, or lets the group go on without it
    # Groups that end while the driver's time for them runs out are all taken; none of them is late.
    clock[0] += pool.ANSWER_SECONDS
    done.extend([(id(first), 0), (id(first), 2), (id(second), 3)])
    assert calls.wait(1.0) == done
    done.clear()
    clock[0] += 60
    with pytest.raises(WorkerError, match=r"(?s)1 prompts were not done 1260 s after 60 s.*ids 4.*for the judge"):
        calls.wait(1.0)


def test_only_what_is_late_is_told_with_the_log_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pool.ray, "wait", lambda calls, num_returns, timeout: (done, []))
    monkeypatch.setattr(pool.PendingCall, "result", lambda self, timeout: [])
    calls = in_flight([Engine(), Engine()], tmp_path / "log", timeout=60.0)
    for member in calls._group.members:
        log = tmp_path / f"{member.name}.log"
        log.write_text(f"the log of {member.name}\n")
        object.__setattr__(member, "log_file", str(log))
    for number in range(2):
        calls.submit(PromptItem(number, number, "", [1]))
    done: list[Any] = list(calls._running)[:1]
    assert calls.wait(1.0) == []
    done.clear()
    clock[0] += 100
    calls.submit(PromptItem(2, 2, "", [1]))  # to the first engine
    clock[0] += pool.ANSWER_SECONDS
    with pytest.raises(WorkerError, match=r"(?s)1 prompts .* in engine 1; prompt ids 1\..*the log of engine 1"):
        calls.wait(1.0)


def test_latencies_of_engines_are_a_mean_over_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        {"reward/calls": 3.0, "reward/latency_mean": 1.0, "reward/latency_max": 2.0},
        {"reward/calls": 1.0, "reward/latency_mean": 5.0, "reward/latency_max": 5.0},
        {"reward/calls": 0.0},  # an engine that had nothing to do
    ]
    engines = EnginePool(WorkerGroup("engine", [], 1.0), 1)
    monkeypatch.setattr(engines.group, "call", lambda method: parts)
    assert engines.pop_metrics() == {"reward/calls": 4.0, "reward/latency_mean": 2.0, "reward/latency_max": 5.0}


def test_an_agents_wishes_change_nothing_in_how_it_is_served() -> None:
    completion = CompletionOutput(0, "", [7, 7, 9], None, None, finish_reason="stop", stop_reason="ab")
    asked: list[Any] = []

    async def answer(prompt: Any, sampling: Any) -> Any:
        asked.append(sampling)
        return SimpleNamespace(outputs=[completion], kv_transfer_params={LOGPROBS: [-0.5, -0.25, -2.0]})

    engine = VLLMEngine.__new__(VLLMEngine)
    engine._run = answer  # type: ignore[method-assign]
    wishes = {"detokenize": True, "logprobs": 5, "stop": ["x"], "extra_args": {"own": 1}}
    for extra in ((), tuple(wishes.items())):
        sampling = SamplingParams(logprobs=True, max_tokens=3, stop=("ab", "c"), extra=extra)
        result = asyncio.run(engine.generate([1], sampling))
        assert (result.token_ids, result.logprobs) == ([7, 7, 9], [-0.5, -0.25, -2.0])
        assert (result.finish_reason, result.stop_reason) == ("stop", "ab")
        assert asked[-1].logprobs == 0 and not asked[-1].detokenize and not asked[-1].stop
        assert asked[-1].extra_args == ({"own": 1} if extra else {}) | {STOP_STRINGS: ["ab", "c"]}
    asyncio.run(engine.generate([1], SamplingParams()))
    assert asked[-1].extra_args is None and asked[-1].logprobs is None
    with pytest.raises(ValueError, match="empty stop string"):
        SamplingParams(stop=("a", ""))


@dataclass
class TwoCaches:
    """vLLM's front end and core, each of which keeps what images it knows."""

    front: set[bytes] = field(default_factory=set)
    core: set[bytes] = field(default_factory=set)
    rendered: int = 0

    async def render(self, llm: Any, token_ids: list[int], images: list[PlacedImage]) -> Any:
        self.rendered += 1
        sent = [(image.data, image.data in self.front) for image in images]  # whole, or its hash
        self.front.update(data for data, _ in sent)
        return {"prompt_token_ids": token_ids, "images": sent}

    async def run(self, prompt: Any, sampling: Any) -> Any:
        missing = {data for data, known in prompt["images"] if known and data not in self.core}
        self.core.update(data for data, known in prompt["images"] if not known)
        self.front -= missing
        reason = FinishReason.ERROR if missing else FinishReason.STOP
        token_ids = [] if missing else [7, 9]
        completion = CompletionOutput(0, "", token_ids, None, None, finish_reason=str(reason))
        return SimpleNamespace(outputs=[completion], kv_transfer_params=None)


def engine_with(caches: TwoCaches, monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    monkeypatch.setattr(vllm_engine, "multimodal_prompt", caches.render)
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._llm, engine._run = None, caches.run  # type: ignore[method-assign]
    return engine


def test_images_that_vllm_lost_while_it_was_paused_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = TwoCaches()
    engine = engine_with(caches, monkeypatch)
    images = [PlacedImage(0, 1, b"cat"), PlacedImage(2, 1, b"dog")]

    def sampled() -> list[int]:
        return asyncio.run(engine.generate([5, 1, 5, 1], SamplingParams(), images)).token_ids

    assert sampled() == sampled() == [7, 9] and caches.rendered == 2  # the second time by their hashes
    caches.core.clear()  # a pause, which the front end does not hear of for images that came during it
    assert sampled() == [7, 9] and caches.rendered == 4
    caches.front.add(b"bird")  # rendered for a request that was given up before it was sent
    images.append(PlacedImage(4, 1, b"bird"))
    assert sampled() == [7, 9] and caches.rendered == 6


def test_an_engine_that_can_never_read_an_image_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = TwoCaches()
    engine = engine_with(caches, monkeypatch)

    async def fails(prompt: Any, sampling: Any) -> Any:
        completion = CompletionOutput(0, "", [], None, None, finish_reason=str(FinishReason.ERROR))
        return SimpleNamespace(outputs=[completion], kv_transfer_params=None)

    engine._run = fails  # type: ignore[method-assign]
    result = asyncio.run(engine.generate([5], SamplingParams(), [PlacedImage(0, 1, b"cat")]))
    assert (result.token_ids, result.finish_reason, caches.rendered) == ([], "error", IMAGE_TRIES)


def test_what_vllm_refuses_is_told_in_words_that_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD_VARIABLE, "spawn")
    model = make_tiny_model(tmp_path / "model")
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._core = CoreStart()
    arguments = model_arguments(model, "fp32", 100_000, on_cpu=True)
    engine.spec = EngineSpec(0, arguments, "gloo", str(tmp_path / "log"), {})
    told = r"vLLM refuses the engine \(its max_model_len is --max_len\): .*max_model_len \(100000\) is greater than"
    with pytest.raises(RefusedByVLLM, match=told) as caught:
        asyncio.run(engine.start(PPOConfig()))
    assert str(cloudpickle.loads(cloudpickle.dumps(caught.value))) == str(caught.value)
