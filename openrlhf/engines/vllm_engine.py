"""One vLLM engine as a Ray actor: generation, sleep, weight updates and the rollouts that run beside it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from openrlhf.config import PPOConfig
from openrlhf.engines.core_process import CoreStart
from openrlhf.engines.images import multimodal_prompt
from openrlhf.engines.spec import EngineSpec
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.protocol import GenerationResult, PlacedImage, SamplingParams
from openrlhf.rollout.rewards import RewardClient
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.process import redirect_output, resident_bytes, unlink_shared_resources

if TYPE_CHECKING:
    from pydantic import ValidationError

    from openrlhf.engines.weight_sync.compare import Comparison


def _prepare_process(spec: EngineSpec, visible_devices: str | None) -> None:
    """Everything that must be in place before vLLM or torch is imported."""
    redirect_output(spec.log_file)
    os.environ.update(spec.environment)
    os.environ["OPENRLHF_ENGINE_PID"] = str(os.getpid())
    # CUDA IPC handles of a weight transfer are pickled on their way from this process to vLLM's own.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices


class RefusedByVLLM(ExplainedError, ValueError):
    """What an engine is asked for does not go with the model, or not with vLLM."""


def refusal(error: ValidationError) -> RefusedByVLLM:
    """What vLLM's checks of its arguments say. Their own error can't travel through Ray."""
    told = "; ".join(part["msg"] for part in error.errors())
    hint = " (its max_model_len is --max_len)" if "max_model_len" in told else ""
    return RefusedByVLLM(f"vLLM refuses the engine{hint}: {told}")


UNSYNCED = "default"
"""vLLM's label of the weights that it loaded itself."""

IMAGE_TRIES = 4
"""Times that a request with images is sent. Each can miss an image that another one was to send, and did not."""


class VLLMEngine:
    """A vLLM ``AsyncLLM`` and the episodes that use it.

    Sampling log-probs are those of the processed distribution (temperature, top-p, top-k), since that is the
    distribution the tokens came from. Weight versions are the trainer's numbers, 0 for the model as it was loaded.
    """

    def __init__(self, spec: EngineSpec, visible_devices: str | None = None) -> None:
        _prepare_process(spec, visible_devices)
        self._core = CoreStart()
        self.spec = spec
        self._request_ids = itertools.count()
        self._episodes: EpisodeSpec | None = None
        self._llm: Any = None
        self._weight_version = 0

    async def start(self, cfg: PPOConfig) -> None:
        """Load the model and what rollouts need (reward functions, agents).

        Raises:
            RefusedByVLLM: the arguments don't go together, or not with the model.
            Exception: whatever vLLM raises when the model can't be served; the actor's log has the details.
        """
        # Imported here, not at the top: the environment above must be set first, and only this process pays.
        from pydantic import ValidationError
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from openrlhf.engines.rollouts import episode_spec

        transfer = WeightTransferConfig(backend=self.spec.weight_transport)
        engine_args = AsyncEngineArgs(**self.spec.arguments, weight_transfer_config=transfer)
        # As for offline inference: many sequences at once matter more here than the latency of one.
        try:
            with self._core.used():
                self._llm = AsyncLLM.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        except ValidationError as error:
            raise refusal(error) from None  # as a cause it would be pickled, too
        self._episodes = episode_spec(cfg)

    # --- generation ------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> GenerationResult:
        """Sample one continuation of a prompt; ids in, ids out. The ids have every image's tokens in place."""
        options = self._vllm_sampling(sampling)
        if images:
            output = await self._run_with_images(prompt_token_ids, options, images)
        else:
            output = await self._run(_prompt(prompt_token_ids), options)
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        return GenerationResult(
            token_ids=token_ids,
            logprobs=_sampled_logprobs(output) if sampling.logprobs else None,
            finish_reason=completion.finish_reason or "abort",
            weight_version=_token_versions(completion.weight_versions, len(token_ids)),
            stop_reason=completion.stop_reason,
        )

    async def run_group(self, prompt: PromptItem, n: int, sampling: SamplingParams) -> Group:
        """Run the ``n`` episodes of one prompt, rewards included (not those of a reward model)."""
        assert self._episodes is not None  # start() made it
        spec = replace(self._episodes, sampling=sampling, weight_version=self._weight_version)
        return await run_group(prompt, n, self, spec)

    @property
    def _rewards(self) -> RewardClient | None:
        return None if self._episodes is None else self._episodes.rewards

    async def pop_metrics(self) -> dict[str, float]:
        """Reward counts and latencies since the last call, and the host memory of the engine's processes."""
        rewards = self._rewards.pop_metrics() if self._rewards is not None else {}
        return {**rewards, "memory/engine_host_gib_max": resident_bytes(children=True) / 2**30}

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Log-probs at temperature 1 of tokens 1..T-1 of a text: float[T], 0 at the first position."""
        from vllm import SamplingParams as VLLMSampling

        options = VLLMSampling(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        output = await self._run(_prompt(token_ids), options)
        entries = output.prompt_logprobs
        return [0.0] + [entry[token].logprob for entry, token in zip(entries[1:], token_ids[1:], strict=True)]

    async def _run_with_images(self, token_ids: list[int], sampling: Any, images: Sequence[PlacedImage]) -> Any:
        """As :meth:`_run`, once more where vLLM's core has not the images that its front end believes are there.

        The front end sends the core an image once, and its hash after that. Images of requests that are given up before
        they are sent are known to the front end alone, as are those that the core alone drops when its cache is full.
        The core answers a hash that it does not know with an error and no tokens, and the front end forgets it.
        """
        for _ in range(IMAGE_TRIES):
            output = await self._run(await multimodal_prompt(self._llm, token_ids, images), sampling)
            completion = output.outputs[0]
            if completion.token_ids or completion.finish_reason != "error":
                break
        return output

    async def _run(self, prompt: Any, sampling: Any) -> Any:
        request_id = f"{self.spec.index}-{next(self._request_ids)}"
        outputs = [o async for o in self._llm.generate(prompt, sampling, request_id)]
        return outputs[-1]

    def _vllm_sampling(self, sampling: SamplingParams) -> Any:
        from vllm import SamplingParams as VLLMSampling
        from vllm.sampling_params import RequestOutputKind

        from openrlhf.engines.stop_strings import STOP_STRINGS

        options = {name: getattr(sampling, name) for name in SamplingParams.names()}
        options |= {
            "top_k": max(sampling.top_k, 0),
            "stop": None,
            "stop_token_ids": list(sampling.stop_token_ids) or None,
            "logprobs": 0 if sampling.logprobs else None,
            "skip_special_tokens": False,
            # Nobody reads the text. The core looks for stop strings, which vLLM would decode every token for.
            "detokenize": False,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        extra = dict(sampling.extra)
        if sampling.stop:
            options["extra_args"] = {**(extra.get("extra_args") or {}), STOP_STRINGS: list(sampling.stop)}
        return VLLMSampling(**(extra | options))

    # --- weights ---------------------------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Begin an update. Running requests are frozen: they keep their tokens and go on with the new weights."""
        # Engines that can sleep did so since the last request, and take no other before the update is over.
        if not self.spec.can_sleep:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            # What was computed with the old weights, and no more. vLLM would clear its caches of processed images, too:
            # in the front end before the pause and in the core after it, so that the core lost images that came
            # meanwhile. Once told, the front end drops them, even from under a request that it is processing.
            await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.reset_encoder_cache()
        await self._llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await self._llm.update_weights(request)

    async def finish_weight_update(self, weight_version: int) -> None:
        """End an update: tokens that are sampled from now on carry this version.

        Raises:
            RuntimeError: requests hold on to what was computed with the old weights.
        """
        await self._llm.finish_weight_update(weight_version=str(weight_version))
        self._weight_version = weight_version
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("the cache of prefixes could not be cleared after a weight update: requests are running")
        if not self.spec.can_sleep:
            await self._llm.resume_generation()

    async def compare_weights(self, folder: str) -> list[Comparison]:
        """Compare every tensor with the weights in a folder of safetensors files, one answer per worker."""
        return list(await self._llm.collective_rpc("compare_weights", args=(folder,)))

    # --- life cycle ------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Give the GPU memory back, that of the weights too: a sync must follow waking them."""
        if self.spec.can_sleep:
            await self._llm.sleep(level=2)

    async def wake(self, tags: list[str]) -> None:
        """Take the memory of any of "weights" and "kv_cache" again."""
        if self.spec.can_sleep:
            await self._llm.wake_up(tags)

    async def shutdown(self) -> None:
        """Stop vLLM's processes and remove what they shared, whatever state they are in."""
        try:
            if self._rewards is not None:
                await self._rewards.close()
            if self._llm is not None:
                self._llm.shutdown()
        finally:
            self._core.close()
            unlink_shared_resources()


def _prompt(token_ids: list[int]) -> Any:
    """Token ids as vLLM's own preprocessing makes them of a prompt; it has nothing to do for ids."""
    from vllm.inputs import tokens_input

    return tokens_input(token_ids)


def _sampled_logprobs(output: Any) -> list[float]:
    """Log-probs of a response, as the scheduler sends them."""
    from openrlhf.engines.final_outputs import LOGPROBS

    return (output.kv_transfer_params or {}).get(LOGPROBS, [])


def _token_versions(spans: Sequence[Any] | None, count: int) -> int | list[int]:
    """Weight versions of a response from vLLM's spans: one for all of it, or one for each of ``count`` tokens."""
    versions = [0 if span.version == UNSYNCED else int(span.version) for span in spans or ()]
    if len(set(versions)) <= 1:
        return versions[0] if versions else 0
    each = [version for version, span in zip(versions, spans or (), strict=True) for _ in range(span.start, span.end)]
    return each[:count]


VLLMEngineActor = ray.remote(VLLMEngine)
