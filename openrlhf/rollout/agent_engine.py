"""The `llm_engine` and `sampling_params` that agent code gets, shaped like vLLM's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from openrlhf.rollout.errors import AgentError, EngineError, describe_exception
from openrlhf.rollout.images import PromptImages
from openrlhf.rollout.protocol import GenerationEngine, GenerationResult, PlacedImage, SamplingParams, Tokenizer
from openrlhf.rollout.seeding import derive_seed
from openrlhf.rollout.text import continuation_text
from openrlhf.rollout.trajectory import FINISH_REASONS
from openrlhf.utils.images import ImageError

# What vLLM's SamplingParams has besides our options, with the values it has there when nobody sets them.
_VLLM_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bad_words": [],
    "logit_bias": None,
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "flat_logprobs": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "extra_args": None,
}


class AgentSamplingParams(SimpleNamespace):
    """Sampling options as agent code sees them: mutable, one copy per sample, named as in vLLM.

    They are those of `SamplingParams`; `logprobs` is 1 or None here. vLLM's other options have its defaults. Attributes
    that are set besides go to the engine as they are.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _VLLM_DEFAULTS:
            raise AttributeError(
                f"sampling_params has no {name!r}; it has {', '.join((*SamplingParams.names(), *_VLLM_DEFAULTS))}"
            )
        value = copy.copy(_VLLM_DEFAULTS[name])
        if isinstance(value, list):
            setattr(self, name, value)  # what is appended to it shall count
        return value

    @classmethod
    def from_sampling(cls, sampling: SamplingParams) -> AgentSamplingParams:
        """Makes a fresh mutable copy of our frozen options."""
        values = {name: getattr(sampling, name) for name in SamplingParams.names()}
        values["stop"], values["stop_token_ids"] = list(sampling.stop), list(sampling.stop_token_ids)
        values["logprobs"] = 1 if sampling.logprobs else None
        return cls(**values, **dict(sampling.extra))

    def clone(self) -> AgentSamplingParams:
        """Returns an independent copy."""
        return copy.deepcopy(self)


def to_sampling(params: Any) -> SamplingParams:
    """Reads our frozen options from an AgentSamplingParams, a vLLM SamplingParams, or a dict.

    Raises:
        AgentError: a value is out of range.
    """
    if isinstance(params, SamplingParams):
        return params
    names = SamplingParams.names()
    given = _option_values(params)
    if given.pop("n", 1) not in (1, None):
        raise AgentError("sampling_params.n must be 1; call llm_engine.generate() once for each continuation")
    # How the answer travels is the engine's business, and agents get text in any case.
    for name in ("output_kind", "detokenize", "stream_interval"):
        given.pop(name, None)
    values = {name: given[name] for name in names if name in given}
    stop = values.get("stop") or ()
    values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
    # vLLM counts alternatives: None = no log-probabilities, 0 and more = the sampled token's, and others.
    values["logprobs"] = values.get("logprobs") is not None and values.get("logprobs") is not False
    values["extra"] = tuple((name, value) for name, value in given.items() if name not in names)
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise AgentError(f"the agent's sampling_params are not usable: {error}") from error


def _option_values(params: Any) -> dict[str, Any]:
    if isinstance(params, dict):
        return dict(params)
    struct_fields = getattr(type(params), "__struct_fields__", None)
    if struct_fields is None:
        return {name: value for name, value in vars(params).items() if not name.startswith("_")}
    # A vLLM SamplingParams: what differs from its defaults was asked for, the rest is vLLM's own business.
    default = type(params)()
    values = {}
    for name in struct_fields:
        value = getattr(params, name)
        if name in SamplingParams.names() or (not name.startswith("_") and value != getattr(default, name)):
            values[name] = value
    return values


@dataclass
class Logprob:
    """Log-probability of one token, as in vLLM's output."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One completion, as in vLLM's output."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """One answered request, as in vLLM's output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True)
class EngineCall:
    """A record of one generation: what went in and what was sampled.

    Attributes:
        limit: most tokens that it could have, where that is less than the episode had room for.
    """

    prompt_token_ids: list[int]
    result: GenerationResult
    images: tuple[PlacedImage, ...] = ()
    limit: int | None = None


class AgentEngine:
    """The `llm_engine` of one episode. It records every call, so that sampled ids, log-probabilities and
    weight versions need not pass through the agent's hands.

    Attributes:
        name: the sample, for messages.
        calls: records of the generations so far.
        prompt_text: text of the episode's prompt.
        prompt_token_ids: its ids, cut to the prompt limit, with all tokens of its images.
        images: how prompts have images; None where the model takes none.
        placed: the images of the prompt.
        engine_error: the engine's exception if the last call failed, to tell engine trouble from agent trouble.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        logprobs: bool,
        seed: int | None = None,
        prompt_text: str = "",
        prompt_token_ids: Sequence[int] = (),
        name: str = "sample",
        images: PromptImages | None = None,
        placed: Sequence[PlacedImage] = (),
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._logprobs = logprobs
        self._seed = seed
        self.name = name
        self.prompt_text = prompt_text
        self.prompt_token_ids = list(prompt_token_ids)
        self.images = images
        self.placed = tuple(placed)
        self.calls: list[EngineCall] = []
        self._started = 0
        self.engine_error: EngineError | None = None

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Continues `prompt_token_ids`; never past the episode's length limit.

        With no room left the output has no tokens and finish_reason "length".

        Args:
            multi_modal_data: {"image": the images of all of `prompt_token_ids`, in order}; left out, those of the
                prompt where the ids begin with `self.prompt_token_ids`. Ids with one token an image get the others;
                the output's `prompt_token_ids` have them.

        Raises:
            AgentError: the arguments are unusable.
            EngineError: the engine failed.
        """
        try:
            prompt = [int(token) for token in prompt_token_ids]
        except (TypeError, ValueError) as error:
            raise AgentError(
                f"{self.name}: llm_engine.generate() wants a list of token ids first, got "
                f"{type(prompt_token_ids).__name__} ({error})"
            ) from error
        prompt, images = await self._with_images(prompt, multi_modal_data)
        sampling = to_sampling(sampling_params)
        room = self._max_length - len(prompt)
        if room <= 0:
            return self._output(prompt, GenerationResult([], None, "length"), sampling)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        prepared = self._prepared(sampling, limit)
        try:
            result = await generate_checked(self._engine, prompt, prepared, images, self.name)
        except EngineError as error:
            self.engine_error = error
            raise
        self.engine_error = None
        self.calls.append(EngineCall(prompt, result, images, limit if limit < room else None))
        return self._output(prompt, result, sampling)

    async def _with_images(self, prompt: list[int], data: Any) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """The ids with all tokens of their images, and where these are."""
        if data is not None and (not isinstance(data, Mapping) or set(data) != {"image"}):
            raise AgentError(f'{self.name}: multi_modal_data must be {{"image": [images]}}, got {str(data)[:200]}')
        given = (data or {}).get("image") or ()
        given = given if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else [given]
        if not given:
            if prompt[: len(self.prompt_token_ids)] == self.prompt_token_ids:
                return prompt, self.placed
            if self.placed and self.images is not None and self.images.token_id in prompt:
                raise AgentError(
                    f"{self.name}: the ids have places for images, and no images are given: begin with "
                    'llm_engine.prompt_token_ids, or give multi_modal_data={"image": images}'
                )
            return prompt, ()
        if all(isinstance(image, PlacedImage) for image in given):
            return prompt, tuple(given)
        if self.images is None:
            raise AgentError(f"{self.name}: multi_modal_data has images, but --max_images_per_prompt is 0")
        try:
            ids, placed = self.images.place(prompt, await self.images.read(given))
        except ImageError as error:
            raise AgentError(f"{self.name}: multi_modal_data: {error}") from error
        return ids, tuple(placed)

    def _prepared(self, sampling: SamplingParams, limit: int) -> SamplingParams:
        seed = sampling.seed
        if seed is not None and seed == self._seed and self._started:
            # The same seed in every turn, or in calls side by side, would tie their random draws together.
            seed = derive_seed(seed, self._started)
        self._started += 1
        return replace(
            sampling,
            max_tokens=limit,
            min_tokens=min(sampling.min_tokens, limit),
            logprobs=sampling.logprobs or self._logprobs,
            seed=seed,
        )

    def _output(self, prompt: list[int], result: GenerationResult, sampling: SamplingParams) -> RequestOutput:
        ids = [int(token) for token in result.token_ids]
        text = completion_text(self._tokenizer, prompt, result, sampling)
        logprobs: list[dict[int, Logprob]] | None = None
        total = None
        if result.logprobs is not None:
            logprobs = [{token: Logprob(float(value))} for token, value in zip(ids, result.logprobs, strict=True)]
            total = float(sum(result.logprobs))
        completion = CompletionOutput(0, text, ids, total, logprobs, result.finish_reason, result.stop_reason)
        return RequestOutput(f"{self.name} turn {len(self.calls)}", None, prompt, [completion])


def completion_text(
    tokenizer: Tokenizer, prompt: Sequence[int], result: GenerationResult, sampling: SamplingParams
) -> str:
    """Decodes a completion as vLLM does: without the stop token, and up to a matched stop string."""
    ids = list(result.token_ids)
    stops = {tokenizer.eos_token_id, *sampling.stop_token_ids}
    if result.finish_reason == "stop" and ids and ids[-1] in stops and not sampling.include_stop_str_in_output:
        ids = ids[:-1]
    text = continuation_text(tokenizer, prompt, ids, skip_special_tokens=sampling.skip_special_tokens)
    if result.finish_reason == "stop":
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        if found:
            position, stop = min(found)
            text = text[: position + len(stop)] if sampling.include_stop_str_in_output else text[:position]
    return text


async def generate_checked(
    engine: GenerationEngine, prompt: list[int], sampling: SamplingParams, images: Sequence[PlacedImage], name: str
) -> GenerationResult:
    """Samples a continuation, by an engine that keeps its contract.

    Args:
        images: engines that know none need not take any.
        name: the sample, for messages.

    Raises:
        EngineError: the request failed, no tokens came, log-probabilities are missing, or lengths differ.
    """
    try:
        result = await engine.generate(prompt, sampling, **({"images": tuple(images)} if images else {}))
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"{name}: the generation engine failed: {describe_exception(error)}") from error
    problem = next(_broken_contracts(result, sampling), None)
    if problem is not None:
        raise EngineError(f"{name}: the engine {problem}")
    return result


def _broken_contracts(result: GenerationResult, sampling: SamplingParams) -> Iterator[str]:
    count = len(result.token_ids)
    if result.finish_reason not in FINISH_REASONS:
        yield f"ended with finish_reason {result.finish_reason!r}"
    if count == 0:
        yield f"returned no tokens (finish_reason {result.finish_reason!r})"
    if sampling.logprobs and result.logprobs is None:
        yield "returned no log-probabilities, which were asked for"
    if result.logprobs is not None and len(result.logprobs) != count:
        yield f"returned {len(result.logprobs)} log-probabilities for {count} tokens"
    if not isinstance(result.weight_version, int) and len(result.weight_version) != count:
        yield f"returned {len(result.weight_version)} weight versions for {count} tokens"
    if sampling.max_tokens is not None and count > sampling.max_tokens:
        yield f"returned {count} tokens, max_tokens was {sampling.max_tokens}"
