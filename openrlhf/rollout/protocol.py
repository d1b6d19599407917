"""What rollouts ask of a generation engine and of a tokenizer, and the sampling options they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """Options of one generation request. Every field is explicit, and its default is neutral.

    An engine must take each value as it stands and must not fill in defaults from the model's folder:
    otherwise the policy that samples is not the policy that is trained.

    Attributes:
        temperature: divisor of the logits; 0 means greedy.
        top_p: mass of the nucleus, 1.0 = off.
        top_k: number of candidates, -1 = off.
        min_p: least probability relative to the best token, 0.0 = off.
        repetition_penalty: 1.0 = off.
        max_tokens: limit of new tokens, None = up to the context length.
        min_tokens: no stop token before that many tokens.
        stop: strings that end generation.
        stop_token_ids: ids that end generation, besides the tokenizer's end-of-sequence id.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: return the log-probability of each sampled token.
        seed: seed of this request, None = the engine's own random state.
        skip_special_tokens: leave special tokens out of decoded text.
        include_stop_str_in_output: keep a matched stop string in decoded text.
        extra: further engine-specific options, (name, value) pairs, handed on as they are.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    seed: int | None = None
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if self.temperature < 0:
            problems.append(f"temperature {self.temperature} is negative")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p {self.top_p} is not in (0, 1]")
        if self.top_k < -1:
            problems.append(f"top_k {self.top_k} is below -1 (-1 and 0 mean off)")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p {self.min_p} is not in [0, 1]")
        if self.max_tokens is not None and self.max_tokens < 1:
            problems.append(f"max_tokens {self.max_tokens} is below 1")
        if self.min_tokens < 0:
            problems.append(f"min_tokens {self.min_tokens} is negative")
        if "" in self.stop:
            problems.append("an empty stop string ends nothing")
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all options but `extra`."""
        return tuple(f.name for f in fields(cls) if f.name != "extra")


@dataclass(frozen=True)
class PlacedImage:
    """An image in a sequence of tokens.

    Attributes:
        offset: index of the first of its tokens.
        length: number of its tokens.
        data: contents of the image file.
    """

    offset: int
    length: int
    data: bytes


@dataclass(frozen=True)
class GenerationResult:
    """What an engine sampled for one request.

    Attributes:
        token_ids: the new tokens, stop token included.
        logprobs: one log-probability for each of them, or None if they were not asked for.
        finish_reason: "stop", "length" or "abort".
        weight_version: version of the weights, one number, or one for each token if weights changed
            meanwhile.
        stop_reason: the stop string or stop id that ended generation, if the engine says so.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish_reason: str
    weight_version: int | Sequence[int] = 0
    stop_reason: int | str | None = None


class GenerationEngine(Protocol):
    """Anything that continues a row of token ids."""

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> GenerationResult:
        """Samples one continuation of `prompt_token_ids`; `images` is only given where there are any."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollouts use."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: Any) -> str: ...
