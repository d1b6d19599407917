"""Stop strings, looked for in vLLM's core, where tokens are sampled.

vLLM's front end decodes every token of a request with stop strings to look at its text, and so wants them one by one.
Few tokens can end a given string, though: only when one of these is sampled must anybody look. Then it is vLLM's own
detokenizer that does, so that what counts as a stop string is what counts there.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.request import Request

STOP_STRINGS = "stop_strings"
"""Of a request's ``extra_args``: strings that end it."""

_PART_OF_A_CHARACTER = "\ufffd"


class Endings:
    """Which tokens of a vocabulary can end a string, worked out when it is first asked for (half a second)."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._found: dict[frozenset[str], frozenset[int]] = {}

    @cached_property
    def _texts(self) -> list[str]:
        every = [[token] for token in range(len(self.tokenizer))]
        return self.tokenizer.batch_decode(every, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def parts(self) -> frozenset[int]:
        """Tokens with a part of a character, whose text may only be known when the next token is there."""
        return frozenset(token for token, text in enumerate(self._texts) if _PART_OF_A_CHARACTER in text)

    def of(self, strings: Sequence[str]) -> frozenset[int] | None:
        """Tokens in which one of the strings may end; None: in any."""
        # Some decoders leave out a token's space where it begins a text, as it does here.
        if any(string.endswith((" ", _PART_OF_A_CHARACTER)) for string in strings):
            return None
        characters = frozenset(string[-1] for string in strings)
        if characters not in self._found:  # all requests of a run have the same strings, and so share one set
            ending = (token for token, text in enumerate(self._texts) if not characters.isdisjoint(text))
            self._found[characters] = self.parts.union(ending)
        return self._found[characters]


class StopWatch:
    """Looks for stop strings in the response of one request.

    Args:
        request: the text of its prompt decides how its first token is decoded, its ``min_tokens`` from when on a string
            counts.
        strings: not empty, and no empty ones.
    """

    def __init__(self, request: Request, strings: Sequence[str], endings: Endings) -> None:
        sampling = copy.copy(request.sampling_params)
        sampling.stop, sampling.detokenize = list(strings), True
        prompt = request.prompt_token_ids or []
        self._shown: Any = SimpleNamespace(
            request_id=request.request_id, sampling_params=sampling, prompt_token_ids=prompt, prompt_embeds=None
        )
        self._tokenizer = endings.tokenizer
        self._endings, self._parts = endings.of(strings), endings.parts
        self._before = prompt[-1:]
        self._seen = 0

    @cached_property
    def _detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer.from_new_request(self._tokenizer, self._shown)

    def may_end(self, before: Sequence[int], token: int) -> bool:
        """Whether a string may be complete with the token; ``before``: the one before it, if there is one."""
        return self._endings is None or token in self._endings or not self._parts.isdisjoint(before or self._before)

    def found(self, token_ids: Sequence[int]) -> str | None:
        """The string that the last token of a response completes. To be asked after every token that may."""
        if not self.may_end(token_ids[-2:-1], token_ids[-1]):
            return None
        new = list(token_ids[self._seen :])
        self._seen = len(token_ids)
        return self._detokenizer.update(new, stop_terminated=False)


def stop_strings(request: Request) -> list[str]:
    """Those that the core is to look for."""
    sampling = request.sampling_params
    return list((sampling is not None and sampling.extra_args or {}).get(STOP_STRINGS, ()))
