"""Steps that are scheduled in one short loop: the worker is told what vLLM's own scheduler tells it, step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_core import MODES, Core, MadeUpExecutor, made_core, random_work
from vllm import SamplingParams
from vllm.multimodal.inputs import PlaceholderRange
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from openrlhf.engines import decode_steps
from openrlhf.engines.decode_steps import DecodeSteps, only_samples
from openrlhf.engines.final_outputs import FinalOutputs, Kept, one_token_a_row
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def written(value: Any) -> str:
    """With sets in order, and the fields of what would leave some out."""
    if isinstance(value, set):
        return str(sorted(value))
    if isinstance(value, list | tuple):
        return str([written(each) for each in value])
    if hasattr(value, "num_computed_tokens"):  # data of requests
        return str({name: written(each) for name, each in vars(value).items()})
    return str(value)


def state(scheduler: FinalOutputs) -> list[Any]:
    """All that a later step depends on, of requests and of the cache."""
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = scheduler.kv_cache_manager.block_pool
    requests = [
        (
            *(name, request.num_computed_tokens, request.num_output_placeholders, request.num_in_flight_tokens),
            *(request.num_stale_output_tokens, request.status, request.is_prefill_chunk, list(request.all_token_ids)),
            *([block.block_id for block in manager.req_to_blocks.get(name, ())], manager.num_cached_block.get(name)),
            *(list(request.block_hashes), list(request.spec_token_ids), request.num_preemptions),
        )
        for name, request in sorted(scheduler.requests.items())
    ]
    queues = [[request.request_id for request in queue] for queue in (scheduler.running, scheduler.waiting)]
    blocks = [(block.block_hash, block.ref_cnt) for block in pool.blocks]
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    prefilling = sorted(request.request_id for request in scheduler._inflight_prefills)
    return [requests, queues, blocks, free, prefilling, scheduler.current_step, sorted(scheduler.finished_req_ids)]


def traced(core: Core) -> list[tuple[dict[str, str], list[Any]]]:
    """What the executor is told from now on, and the scheduler's state behind it."""
    trace: list[tuple[dict[str, str], list[Any]]] = []

    def told(scheduled: SchedulerOutput) -> None:
        trace.append(({name: written(value) for name, value in vars(scheduled).items()}, state(core.scheduler)))

    core.executor.told = told
    return trace


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("blocks", "caching"), [(14, True), (200, True), (40, False)])
def test_the_worker_is_told_what_vllm_tells_it(
    monkeypatch: pytest.MonkeyPatch, model: str, mode: str, blocks: int, caching: bool
) -> None:
    """Random work, token for token and block for block, in a cache that is too small and in one with room."""
    made = [
        made_core(
            *(monkeypatch, model, mode),
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=caching,
            max_num_batched_tokens=41,  # with two at work, all of a prompt of 40 but its last token
        )
        for _ in range(2)
    ]
    short = {"_schedule_decodes": 0, "_schedule_waiting": 0, "add_token": 0}
    for name in short:
        owner: Any = Kept if name == "add_token" else DecodeSteps
        method = getattr(owner, name)

        def count(*args: Any, name: str = name, original: Any = method) -> Any:
            short[name] += 1
            assert name == "add_token" or not args[0]._special
            return original(*args)

        monkeypatch.setattr(owner, name, count)
    ours, vllms = made
    assert ours.scheduler._plain
    vllms.scheduler._plain = False  # every step and token is vLLM's
    traces = [traced(core) for core in made]
    preempted = random_work(vllms, 300)
    assert set(short.values()) == {0}
    assert random_work(ours, 300) == preempted
    for step, (our, their) in enumerate(zip(*traces, strict=True)):
        assert our == their, step
    assert ours.requests == vllms.requests
    assert short["_schedule_decodes"] > len(traces[0]) / 4 and len(traces[0]) - short["_schedule_decodes"] > 100
    assert short["_schedule_waiting"] > 50
    assert short["add_token"] > sum(len(asked.tokens) for asked in ours.requests.values()) / 3
    repeated = [asked for asked in ours.requests.values() if len(set(asked.tokens)) < len(asked.tokens)]
    assert preempted and repeated and not ours.scheduler._special


def test_steps_of_caches_that_are_not_plain_are_vllms(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=20)
    monkeypatch.setattr(MadeUpExecutor, "spec", window)
    core = made_core(monkeypatch, model, MODES[0])
    monkeypatch.delattr(DecodeSteps, "_schedule_decodes")
    random_work(core, 60)
    assert core.executor.steps > 100


@pytest.mark.parametrize(
    "arguments", [{"scheduling_policy": "priority"}, {"long_prefill_token_threshold": 20}, {"watermark": 0.2}]
)
def test_steps_of_other_policies_are_vllms(
    monkeypatch: pytest.MonkeyPatch, model: str, arguments: dict[str, Any]
) -> None:
    assert not made_core(monkeypatch, model, MODES[2], **arguments).scheduler._plain


def test_steps_of_another_vllm_are_its_own(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(decode_steps, "vllm_version", "0.32.0+cu130")
    assert made_core(monkeypatch, model, MODES[0]).scheduler._plain
    monkeypatch.setattr(decode_steps, "vllm_version", "0.32.7")
    assert not made_core(monkeypatch, model, MODES[0]).scheduler._plain


@pytest.mark.parametrize("mode", MODES)
def test_images_are_let_go_of_as_vllm_does(monkeypatch: pytest.MonkeyPatch, model: str, mode: str) -> None:
    """Requests whose image was computed with their prompt: when vLLM asks whether their encoder's output can go."""
    asked: list[list[Any]] = []
    for plain in (False, True):
        core = made_core(monkeypatch, model, mode)
        core.scheduler._plain &= plain
        seen: list[Any] = []
        asked.append(seen)

        def free(self: Any, request: Any, seen: list[Any] = seen) -> None:
            counts = request.num_computed_tokens, request.num_output_placeholders, request.num_tokens
            seen.append((request.request_id, *counts))

        monkeypatch.setattr(FinalOutputs, "_free_encoder_inputs", free)
        core.core.set_weight_version("0")
        names = [core.add(20, 30, alike=True) for _ in range(3)]
        core.turn(3)
        for name in names[:2]:
            core.scheduler.requests[name].mm_features = [SimpleNamespace(mm_position=PlaceholderRange(2, 5))]
        core.finish()
    assert asked[0] == asked[1] and len(asked[0]) > 50


def test_what_else_a_step_may_have_to_do_for_a_request() -> None:
    def made(**more: Any) -> Any:
        fields = {"use_structured_output": False, "resumable": False, "lora_request": None} | more
        return SimpleNamespace(**{"sampling_params": SamplingParams()} | fields)

    assert only_samples(made())
    assert not only_samples(made(sampling_params=None))  # pooling
    assert not only_samples(made(use_structured_output=True)) and not only_samples(made(resumable=True))
    assert not only_samples(made(lora_request=object()))
    repeats = SamplingParams(repetition_detection=RepetitionDetectionParams(2, 1, 2))
    assert not only_samples(made(sampling_params=repeats))


def test_what_else_a_step_may_bring() -> None:
    def made(**more: Any) -> Any:
        nothing = {"logprobs": None, "num_nans_in_logits": {}, "prompt_logprobs_dict": {}}
        return SimpleNamespace(**nothing | {"prompt_token_id_logprobs_dict": {}} | more)

    assert one_token_a_row(made()) and one_token_a_row(made(num_nans_in_logits=None))
    assert one_token_a_row(made(logprobs=SimpleNamespace(cu_num_generated_tokens=None)))
    assert not one_token_a_row(made(logprobs=SimpleNamespace(cu_num_generated_tokens=[0, 2])))
    for name in ("num_nans_in_logits", "prompt_logprobs_dict", "prompt_token_id_logprobs_dict"):
        assert not one_token_a_row(made(**{name: {"a": 1}}))
