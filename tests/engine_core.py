"""vLLM's own core loop with a made-up executor in the model's place, turned by hand, and random work for it.

What the executor samples tells version and position: ``version * 1000 + position``.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine import core as vllm_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

from openrlhf.engines import final_outputs
from openrlhf.engines.final_outputs import LOGPROBS, AsyncFinalOutputs, FinalOutputs
from openrlhf.engines.spec import model_arguments
from openrlhf.engines.stop_strings import STOP_STRINGS

MODES = ["a step ahead, as on GPUs", "a step ahead, first runner", "step by step"]
REPEATS = 6
"""Position of the token that a special request samples from then on."""
PAUSE_STEPS = 8
"""Far more than a pause takes."""


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class MadeUpExecutor(Executor):
    """Samples at once what tells when and where it was sampled."""

    spec: KVCacheSpec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)

    def _init_executor(self) -> None:
        self.version = self.steps = 0
        self.told: Callable[[SchedulerOutput], None] | None = None
        self.repeats: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._sampled: ModelRunnerOutput | None = None

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
        answers: dict[str, list[Any]] = {
            "get_kv_cache_spec": [{"layer": self.spec}],
            "determine_available_memory": [2**30],
            "get_supported_kv_cache_layouts": [["NHD"]],
            "compile_or_warm_up_model": [],
        }
        return answers.get(method, [None])

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        self.steps += 1
        if self.told is not None:
            self.told(scheduled)
        has: dict[str, tuple[int, int]] = {}  # tokens whose keys and values are there, and tokens
        for new in scheduled.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self._prompts[new.req_id] = len(new.prompt_token_ids)
            has[new.req_id] = (new.num_computed_tokens, len(new.prefill_token_ids or new.prompt_token_ids))
        running = scheduled.scheduled_cached_reqs
        for name, computed, outputs in zip(
            running.req_ids, running.num_computed_tokens, running.num_output_tokens, strict=True
        ):
            has[name] = (computed, self._prompts[name] + outputs)
        if not scheduled.total_num_scheduled_tokens:
            return done(EMPTY_MODEL_RUNNER_OUTPUT)
        tokens: list[list[int]] = []
        for name, count in scheduled.num_scheduled_tokens.items():
            computed, length = has[name]
            ends = computed + count >= length  # or more of a prompt is to come
            position = min(length - self._prompts[name], self.repeats.get(name, length))
            tokens.append([self.version * 1000 + position] if ends else [])
        rows = len(tokens)
        logprobs = np.array([[-float(row[0]) if row else 1.0, -9.0] for row in tokens], np.float32)
        self._sampled = ModelRunnerOutput(
            req_ids=list(scheduled.num_scheduled_tokens),
            req_id_to_index={name: index for index, name in enumerate(scheduled.num_scheduled_tokens)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(np.zeros((rows, 2), np.int32), logprobs, np.zeros(rows)),
        )
        return done(None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        sampled, self._sampled = self._sampled, None
        return done(sampled) if non_block else sampled


@dataclass
class Asked:
    """A request and what came of it."""

    limit: int
    stop: int | None
    string: bool
    logprobs: bool
    client: int
    special: bool = False
    tokens: list[int] = field(default_factory=list)
    messages: int = 0
    end: FinishReason | None = None
    aborted: bool = False


class Core:
    """vLLM's core, whose loop is turned by hand and whose queues are looked into."""

    def __init__(self, config: VllmConfig) -> None:
        self.core = core = EngineCoreProc.__new__(EngineCoreProc)
        core.input_queue, core.output_queue = queue.Queue(), queue.Queue()
        core.engines_running = core.publish_dp_lb_stats = core.process_input_queue_block = False
        core.engine_index, core.shutdown_state = 0, EngineShutdownState.RUNNING
        EngineCore.__init__(core, config, MadeUpExecutor, log_stats=False)
        self.scheduler = cast(FinalOutputs, core.scheduler)
        self.executor = cast(MadeUpExecutor, core.model_executor)
        self.requests: dict[str, Asked] = {}
        self._names = iter(range(10**9))
        self._answered: set[int] = set()

    @property
    def open(self) -> list[str]:
        return [name for name, asked in self.requests.items() if asked.end is None and not asked.aborted]

    def add(
        self,
        prompt: int,
        limit: int,
        stop: int | None = None,
        logprobs: bool = True,
        client: int = 0,
        string: bool = False,
        alike: bool = False,
        special: bool = False,
    ) -> str:
        name = str(next(self._names))
        if special:  # samples one token again and again, and ends for that
            stop, self.executor.repeats[name] = None, REPEATS
        sampling = SamplingParams(
            max_tokens=limit,
            logprobs=0 if logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            stop_token_ids=None if stop is None or string else [version * 1000 + stop for version in range(100)],
            repetition_detection=RepetitionDetectionParams(2, 1, 2) if special else None,
            extra_args={STOP_STRINGS: [str(stop)]} if stop is not None and string else None,
        )
        ids = [(place if alike else next(self._names)) % 50 + 4 for place in range(prompt)]
        request = EngineCoreRequest(name, ids, None, sampling, None, 0.0, None, None, None, client_index=client)
        limit = min(limit, self.core.vllm_config.model_config.max_model_len - prompt)  # vLLM ends it there
        self.requests[name] = Asked(limit, stop, string, logprobs, client, special)
        self.core.input_queue.put((EngineCoreRequestType.ADD, self.core.preprocess_add_request(request)))
        return name

    def abort(self, name: str) -> None:
        self.requests[name].aborted = True
        self.core.aborts_queue.put([name])  # vLLM's input thread puts it into both
        self.core.input_queue.put((EngineCoreRequestType.ABORT, [name]))

    def call(self, method: str, *args: Any) -> int:
        number = next(self._names)
        self.core.input_queue.put((EngineCoreRequestType.UTILITY, (0, number, method, args)))
        return number

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.core._process_input_queue()
            self.core._process_engine_step()
            while not self.core.output_queue.empty():
                self._receive(*cast(tuple[int, Any], self.core.output_queue.get()))

    def wait(self, number: int) -> None:
        for _ in range(PAUSE_STEPS):
            self.turn()
            if number in self._answered:
                return
        raise AssertionError("no answer: the core hangs")

    def finish(self) -> None:
        for _ in range(3000):
            self.turn()
            if not self.core.has_work():
                break
        assert not self.open and not self.core.has_work()
        assert not self.scheduler._kept and not self.scheduler._watches and not self.scheduler.requests

    def _receive(self, client: int, message: Any) -> None:
        if message.utility_output is not None:
            assert message.utility_output.failure_message is None
            self._answered.add(message.utility_output.call_id)
            return
        assert message.outputs
        for output in message.outputs:
            asked = self.requests[output.request_id]
            assert client == asked.client and asked.end is None
            asked.messages += 1
            self._check(asked, output, message.weight_version)

    def _check(self, asked: Asked, output: EngineCoreOutput, version: str) -> None:
        for token in output.new_token_ids:
            position = len(asked.tokens)
            assert token == int(version) * 1000 + (min(position, REPEATS) if asked.special else position)
            asked.tokens.append(token)
        asked.end = output.finish_reason
        if asked.end in (None, FinishReason.ABORT):
            return
        assert len(set(asked.tokens[:-1])) == len(asked.tokens) - 1
        if asked.end == FinishReason.REPETITION:
            assert asked.special and asked.tokens[-1] == asked.tokens[-2]
            asked.limit = len(asked.tokens)
            asked.end = FinishReason.LENGTH
        stops = asked.stop is not None and asked.stop < asked.limit
        assert asked.end == (FinishReason.STOP if stops else FinishReason.LENGTH)
        assert len(asked.tokens) == (cast(int, asked.stop) + 1 if stops else asked.limit)
        if stops:
            assert output.stop_reason == (str(asked.stop) if asked.string else asked.tokens[-1])
        logprobs = (output.kv_transfer_params or {}).get(LOGPROBS)
        assert logprobs == ([-float(token) for token in asked.tokens] if asked.logprobs else None)


class MadeUpWatch:
    """Of a stop string that names the position of the token in which it ends."""

    def __init__(self, request: Any, strings: list[str], endings: Any) -> None:
        self._string = strings[0]

    def may_end(self, before: Any, token: int) -> bool:
        return token % 1000 == int(self._string)

    def found(self, token_ids: Any) -> str | None:
        return self._string if self.may_end((), token_ids[-1]) else None


def made_core(monkeypatch: pytest.MonkeyPatch, model: str, mode: str, **arguments: Any) -> Core:
    """A core for a model in one of :data:`MODES`."""
    ahead, second = "ahead" in mode, "GPUs" in mode
    # Neither may outlast the test.
    monkeypatch.setattr(vllm_core, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(vllm_core, "enable_envs_cache", lambda: None)
    monkeypatch.setattr(final_outputs, "StopWatch", MadeUpWatch)
    arguments = model_arguments(model, "fp32", 96, on_cpu=True) | {
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "enable_chunked_prefill": True,
        "block_size": 16,
        "num_gpu_blocks_override": 14,  # so that requests are preempted
        **arguments,
    }
    config = AsyncEngineArgs(**arguments).create_engine_config()
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda made: second and made is config))
    config.scheduler_config.async_scheduling = ahead  # never on CPUs
    made = Core(config)
    assert type(made.scheduler) is (AsyncFinalOutputs if ahead else FinalOutputs)
    assert (made.core.batch_queue is not None) == ahead
    return made


def update(core: Core, clear: bool) -> None:
    """New weights, in a pause."""
    core.executor.version += 1
    core.wait(core.call("set_weight_version", str(core.executor.version)))
    if clear:
        core.wait(core.call("reset_prefix_cache"))


def assert_all_was_sent(core: Core) -> None:
    """An idle, paused core: it takes no steps, and the front end has every token."""
    before = core.executor.steps
    core.turn(3)
    assert core.executor.steps == before and not core.core.has_work()
    for name in core.open:
        if name in core.scheduler.requests:
            assert len(core.requests[name].tokens) == core.scheduler.requests[name].num_output_tokens


def random_work(core: Core, rounds: int = 600) -> int:
    """Requests of all kinds, aborts, and pauses in which weights change, the same each time.

    Returns:
        How many times a request was seen that had been preempted.
    """
    core.core.set_weight_version("0")
    preempted = 0
    draw = random.Random(0)
    for _ in range(rounds):
        if draw.random() < 0.35:
            for _ in range(draw.randrange(1, 5)):
                stop = draw.choice([None, None, 3, 4, 8])
                core.add(
                    draw.choice([1, 5, 20, 40]),
                    draw.choice([1, 2, 5, 50, 80]),
                    stop,
                    draw.random() < 0.7,
                    draw.randrange(2),
                    draw.random() < 0.5,
                    draw.random() < 0.4,
                    draw.random() < 0.03,
                )
        if draw.random() < 0.1 and core.open:
            core.abort(draw.choice(core.open))
        if draw.random() < 0.15 and core.executor.version < 99:
            random_pauses(core, draw)
        core.turn(draw.randrange(6))
        preempted += any(request.num_preemptions for request in core.scheduler.requests.values())
    core.finish()
    return preempted


def random_pauses(core: Core, draw: random.Random) -> None:
    """One or several, one after the other, then mostly new weights."""
    for _ in range(draw.randrange(1, 4)):
        clear = draw.random() < 0.6
        pause = core.call("pause_scheduler", "keep", clear)
        if draw.random() < 0.3 and core.open:
            core.abort(draw.choice(core.open))
        if draw.random() < 0.3:
            core.add(5, 5)
        core.wait(pause)
        assert_all_was_sent(core)
    if draw.random() < 0.3 and core.open:
        core.abort(draw.choice(core.open))
    if draw.random() < 0.3:
        core.add(5, 5)
    core.turn(3)
    assert_all_was_sent(core)
    if draw.random() < 0.7:
        update(core, clear)
    core.wait(core.call("resume_scheduler"))
