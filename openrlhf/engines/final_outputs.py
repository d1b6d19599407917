"""A scheduler for vLLM that tells the front end of a response once, when it has ended.

vLLM's core sends every token of every request to the front end, with its log-prob, also for requests that only want the
final output: with hundreds of sequences, tens of thousands of objects a second to make, pack, send, unpack and add up.
Here the core keeps a response until it is whole. The first and the last of its tokens are vLLM's to take in; for those
between, which are nearly all, there is a short loop.

vLLM labels what it sends with the version of the weights at that moment, so what is kept is sent before a pause, during
which weights may change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from openrlhf.engines.decode_steps import DecodeSteps, only_samples
from openrlhf.engines.stop_strings import Endings, StopWatch, stop_strings

LOGPROBS = "sampled_logprobs"
"""Of the dict of a request that vLLM passes on as it is (``kv_transfer_params``): log-probs of the sampled tokens."""


class Kept:
    """What the core keeps of a request.

    Args:
        request: wants one output.
        watch: looks for its stop strings.
        max_model_len: longest prompt with response, in tokens.
    """

    def __init__(self, request: Request, watch: StopWatch | None, max_model_len: int) -> None:
        sampling = request.sampling_params
        assert sampling is not None
        self.request, self._watch = request, watch
        self._only_samples = only_samples(request)
        self._ends = frozenset((sampling.eos_token_id, *(sampling.stop_token_ids or ())))
        self._most = min(request.num_prompt_tokens + request.max_tokens, max_model_len)
        self._wants_logprobs = sampling.num_logprobs is not None
        self._first: EngineCoreOutput | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def waits(self) -> bool:
        """There is something that was not sent."""
        return self._first is not None

    def goes_on(self, token: int) -> bool:
        """The response neither begins nor ends with the token, by whichever of vLLM's rules, and that is all to do."""
        request = self.request
        return (
            self._only_samples
            and self._first is not None
            and token not in self._ends
            and request.num_tokens + 1 < self._most
            and not request.num_stale_output_tokens  # it was preempted since
            and (self._watch is None or not self._watch.may_end(request.output_token_ids[-1:], token))
        )

    def add_token(self, token: int, logprob: float | None) -> None:
        """Keep a token with which the response goes on."""
        self._token_ids.append(token)
        if self._wants_logprobs and logprob is not None:
            self._logprobs.append(logprob)

    def add(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Keep an output; that of the whole response if it ends with this one.

        Its tokens are those that were not sent, its log-probs all there were.
        """
        self._token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self._logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            output.new_logprobs = None
        if self._first is None:
            self._first = output
        if output.finish_reason is None:
            return None
        output.prefill_stats = self._first.prefill_stats
        output.new_prompt_logprobs_tensors = self._first.new_prompt_logprobs_tensors
        output.prompt_token_id_logprobs = self._first.prompt_token_id_logprobs
        output.new_token_ids = self._token_ids
        if self._logprobs:
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), LOGPROBS: self._logprobs}
        return output

    def take(self) -> EngineCoreOutput:
        """What waits, of a response that goes on. Its log-probs stay until the end."""
        assert self._first is not None
        output, output.new_token_ids = self._first, self._token_ids
        self._first, self._token_ids = None, []
        return output


def wants_one_output(request: Request) -> bool:
    """Only the end of the request is looked at. vLLM's own stop strings are looked for in its front end, by token."""
    sampling = request.sampling_params
    return (
        sampling is not None
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.stop
        and sampling.num_logprobs in (None, 0)
        and not request.resumable
    )


def one_token_a_row(sampled: ModelRunnerOutput) -> bool:
    """A step brought nothing but tokens and their log-probs, at most one for each request."""
    several = sampled.logprobs is not None and sampled.logprobs.cu_num_generated_tokens is not None
    return not (
        several or sampled.num_nans_in_logits or sampled.prompt_logprobs_dict or sampled.prompt_token_id_logprobs_dict
    )


class FinalOutputs(DecodeSteps):
    """What is changed in either of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, Kept] = {}
        self._watches: dict[str, StopWatch] = {}

    @cached_property
    def _endings(self) -> Endings:
        return Endings(cached_tokenizer_from_config(self.vllm_config.model_config))

    def add_request(self, request: Request) -> None:
        strings = stop_strings(request)
        watch = StopWatch(request, strings, self._endings) if strings else None
        if watch is not None:
            self._watches[request.request_id] = watch
        if wants_one_output(request):
            self._kept[request.request_id] = Kept(request, watch, self.max_model_len)
        super().add_request(request)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, is_stale)
        watch = self._watches.get(request.request_id)
        # A string in the last token that fits ends a response rather than the limit; an end token comes before either.
        if watch is not None and request.status != RequestStatus.FINISHED_STOPPED:
            string = watch.found(request.output_token_ids)
            if string is not None:
                request.status, request.stop_reason, stopped = RequestStatus.FINISHED_STOPPED, string, True
        return new_token_ids, stopped

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        others = self._add_tokens(scheduler_output, model_runner_output)
        sent = super().update_from_output(others, model_runner_output)
        for outputs in sent.values():
            outputs.outputs = [output for output in map(self._whole, outputs.outputs) if output is not None]
        if self.pause_state == PauseState.PAUSED_ALL:
            for request_id, kept in self._kept.items():
                if kept.waits:
                    client = self.requests[request_id].client_index
                    sent.setdefault(client, EngineCoreOutputs()).outputs.append(kept.take())
        return {client: o for client, o in sent.items() if o.outputs or o.finished_requests or o.scheduler_stats}

    def _add_tokens(self, scheduled: SchedulerOutput, sampled: ModelRunnerOutput) -> SchedulerOutput:
        """Add tokens to responses that go on with them; the step as if only the other requests had been in it.

        This does what vLLM's ``update_from_output`` does for such a token, for each of which it makes an output.
        """
        if not self._plain or not one_token_a_row(sampled):
            return scheduled
        others: dict[str, int] = {}
        logprobs = sampled.logprobs.logprobs[:, 0].tolist() if sampled.logprobs is not None else None
        for name, count in scheduled.num_scheduled_tokens.items():
            kept, row = self._kept.get(name), sampled.req_id_to_index[name]
            tokens: list[int] = sampled.sampled_token_ids[row] if sampled.sampled_token_ids else []
            if kept is None or count != 1 or len(tokens) != 1 or not kept.goes_on(tokens[0]):
                others[name] = count
                continue
            request = kept.request
            request.num_in_flight_tokens -= 1
            if request.mm_features:
                self._free_encoder_inputs(request)
            request.append_output_token_ids(tokens[0])
            if self._a_step_ahead:
                request.num_output_placeholders -= 1
                computed = request.num_computed_tokens - request.num_output_placeholders
                if self._caches_prefixes and computed % self._block_size == 0:
                    self.kv_cache_manager.cache_blocks(request, computed)
            kept.add_token(tokens[0], logprobs[row] if logprobs is not None else None)
        rest = copy.copy(scheduled)
        rest.num_scheduled_tokens = others
        return rest

    def _whole(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        kept = self._kept.get(output.request_id)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        return output if kept is None else kept.add(output)

    def _forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)
        self._watches.pop(request_id, None)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._forget(request.request_id)
        return ended

    def has_requests(self) -> bool:
        # The core takes another step, of no tokens, before it has paused.
        paused = self.pause_state == PauseState.PAUSED_ALL
        return super().has_requests() or (paused and any(kept.waits for kept in self._kept.values()))


class AsyncFinalOutputs(FinalOutputs, AsyncScheduler):
    """The next step is scheduled while the GPU works on this one."""


def make_scheduler(**arguments: Any) -> Scheduler:
    """vLLM calls this as a class (``scheduler_cls``), with what either of its own is made of."""
    config = arguments["vllm_config"].scheduler_config
    return (AsyncFinalOutputs if config.async_scheduling else FinalOutputs)(**arguments)
