"""Steps of a vLLM engine in which responses get one more token each, scheduled in one short loop.

Nearly all steps of a rollout are such steps, and what vLLM's scheduler does for each request in each of them can take
longer than the GPU does: it asks of every request whether it has images, drafts, adapters or prompt left, and whether
its cache has room. Here what is the same for all is asked once, and room in the cache is looked for only at the edges
of its blocks. Requests that begin are vLLM's to schedule, as is any step with something else to do; what the worker is
told is the same either way.
"""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

COMPARED_WITH = ("0.32.0",)
"""vLLM's versions whose own steps these were compared with (tests/engines/test_decode_steps.py)."""


def only_samples(request: Request) -> bool:
    """All that steps do for the request, once its prompt is computed, is to sample tokens and to look for its end."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and not request.use_structured_output
        and not request.resumable
        and request.lora_request is None
        and sampling.repetition_detection is None
    )


class DecodeSteps(Scheduler):
    """What is changed in either of vLLM's schedulers."""

    running: list[Request]
    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._special: set[str] = set()
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._block_size = managers[0].block_size if managers else 0
        self._caches_prefixes = self.kv_cache_manager.enable_caching
        self._a_step_ahead = isinstance(self, AsyncScheduler)
        compared = vllm_version.split("+")[0] in COMPARED_WITH
        self._plain = (
            compared
            and [type(manager) for manager in managers] == [FullAttentionManager]
            and self._block_size == self.hash_block_size
            and self.policy == SchedulingPolicy.FCFS
            and self.num_sampled_tokens_per_step == 1
            and not (self.num_spec_tokens or self.num_lookahead_tokens or self.num_prefill_lookahead)
            and not (self.connector or self.ec_connector or self.aux_output_connector)
            and not (self.log_stats or self.return_sampling_mask or self.is_encoder_decoder)
            and not self.needs_kv_cache_zeroing
            and not (self.scheduler_config.long_prefill_token_threshold or self.kv_cache_manager.watermark_blocks)
            and self.parallel_config.pipeline_parallel_size == self.parallel_config.data_parallel_size == 1
        )
        """Nothing in the engine's configuration asks more of a step."""
        if not compared:
            logger.warning("vLLM %s schedules every step itself: no other way was compared with it", vllm_version)

    def add_request(self, request: Request) -> None:
        if not only_samples(request):
            self._special.add(request.request_id)
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> tuple[Any, Any]:
        self._special.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decodes = None if throttle_prefills else self._decodes()
        if decodes is None:
            return super().schedule(throttle_prefills)
        step = self._schedule_decodes(*decodes)
        active = len(self.running) + self.num_waiting_for_streaming_input
        if (self.waiting or self.kv_holding_waiting) and active < self.max_num_active_reqs:
            step = together(step, self._schedule_waiting(step.total_num_scheduled_tokens))
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(step.num_scheduled_tokens)
        return step

    def _decodes(self) -> tuple[list[Request], list[Request]] | None:
        """The running requests that get a token, and those of them at an edge of a block; None if one wants more."""
        if not self._plain or self._special or self._pause_state != PauseState.UNPAUSED:
            return None
        if not 0 < len(self.running) <= self.max_num_scheduled_tokens:
            return None
        decodes: list[Request] = []
        edges: list[Request] = []
        # A block is cached at its last token.
        block, opened, last = self._block_size, 0, self._block_size - 1 if self._caches_prefixes else -1
        for request in self.running:
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            if under_way and computed + 2 - under_way >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token
            if request.is_prefill_chunk or request.num_tokens + under_way != computed + 1:
                return None
            if computed + 1 >= self.max_model_len:
                return None
            decodes.append(request)
            offset = computed % block
            if offset == 0:
                opened += 1
                edges.append(request)
            elif offset == last:
                edges.append(request)
        return None if opened > self.kv_cache_manager.block_pool.get_num_free_blocks() else (decodes, edges)

    def _schedule_decodes(self, decodes: list[Request], edges: list[Request]) -> SchedulerOutput:
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        opened: dict[str, tuple[list[int], ...] | None] = {}
        for request in edges:
            blocks = self.kv_cache_manager.allocate_slots(request, 1)
            assert blocks is not None  # there are enough
            opened[request.request_id] = blocks.get_block_ids(allow_none=True)
        names = [request.request_id for request in decodes]
        computed = [request.num_computed_tokens for request in decodes]
        scheduled = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                # vLLM's first runner is told those of requests that its last step was without.
                all_token_ids={} if self.use_v2_model_runner else all_tokens(decodes, self.prev_step_scheduled_req_ids),
                new_block_ids=[opened.get(name) for name in names],
                num_computed_tokens=computed,
                # The token that is computed is the last of them, whether it is there or under way.
                num_output_tokens=[
                    count + 1 - request.num_prompt_tokens for count, request in zip(computed, decodes, strict=True)
                ],
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=0,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        ahead = int(self._a_step_ahead)
        for request in decodes:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += ahead
        return scheduled

    def _schedule_waiting(self, taken: int) -> SchedulerOutput:
        """vLLM's step of requests that wait, for which it sees none that run, and ``taken`` fewer tokens."""
        running, limits = self.running, (self.max_num_active_reqs, self.max_num_scheduled_tokens)
        self.running = []
        self.max_num_active_reqs -= len(running)
        self.max_num_scheduled_tokens -= taken
        self.current_step -= 1  # it is the same step
        try:
            return super().schedule()
        finally:
            self.running = running + self.running
            self.max_num_active_reqs, self.max_num_scheduled_tokens = limits


def all_tokens(requests: list[Request], known: set[str]) -> dict[str, list[int]]:
    """Those of requests that are not known."""
    return {each.request_id: each.all_token_ids.copy() for each in requests if each.request_id not in known}


def together(decodes: SchedulerOutput, begun: SchedulerOutput) -> SchedulerOutput:
    """One step out of that of responses that go on and that of requests that begin or begin again."""
    first, second = decodes.scheduled_cached_reqs, begun.scheduled_cached_reqs
    begun.scheduled_cached_reqs = CachedRequestData(
        req_ids=first.req_ids + second.req_ids,
        resumed_req_ids=second.resumed_req_ids,
        new_token_ids=[],
        all_token_ids=first.all_token_ids | second.all_token_ids,
        new_block_ids=first.new_block_ids + second.new_block_ids,
        num_computed_tokens=first.num_computed_tokens + second.num_computed_tokens,
        num_output_tokens=first.num_output_tokens + second.num_output_tokens,
    )
    begun.num_scheduled_tokens = decodes.num_scheduled_tokens | begun.num_scheduled_tokens
    begun.total_num_scheduled_tokens += decodes.total_num_scheduled_tokens
    # vLLM's step began when these were handed out.
    begun.preempted_req_ids, begun.finished_req_ids = decodes.preempted_req_ids, decodes.finished_req_ids
    begun.free_encoder_mm_hashes = decodes.free_encoder_mm_hashes + begun.free_encoder_mm_hashes
    return begun
