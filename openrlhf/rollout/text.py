"""Where a response ends, and which text of it a reward gets to see."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from openrlhf.rollout.protocol import Tokenizer

# Enough context for tokenizers whose decoding of a token depends on its left neighbours (leading blanks,
# characters spread over several tokens); decoding a whole long prompt again for each sample would be
# wasteful.
_CONTEXT_TOKENS = 8


@dataclass(frozen=True)
class ResponseEnd:
    """Where a response ends.

    Attributes:
        length: number of leading tokens that count as actions.
        truncated: the limit cut the response before a stop token came.
        finish_reason: "stop", "length" or "abort".
    """

    length: int
    truncated: bool
    finish_reason: str


def response_end(
    token_ids: Sequence[int], finish_reason: str, stop_ids: Collection[int], ignore_eos: bool = False
) -> ResponseEnd:
    """Finds the end of a response: the first token that is any of `stop_ids` ends it and belongs to it.

    A response whose last token is a stop token is not truncated, even if the engine says "length" because it
    knows fewer stop ids. Nothing is ever appended or overwritten.
    """
    if not ignore_eos:
        for index, token in enumerate(token_ids):
            if token in stop_ids:
                return ResponseEnd(index + 1, False, "stop")
    return ResponseEnd(len(token_ids), finish_reason == "length", finish_reason)


def continuation_text(
    tokenizer: Tokenizer, context_ids: Sequence[int], token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Decodes `token_ids` as they read after `context_ids`: context text + result is the whole text."""
    tail = list(context_ids[-_CONTEXT_TOKENS:])
    new = list(token_ids)
    if not new:
        return ""
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(tail, **options) if tail else ""
    whole = tokenizer.decode(tail + new, **options)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new, **options)


def reward_text(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    eos_ids: Collection[int],
) -> str:
    """Returns the response text that a reward sees.

    Special tokens are kept, except padding; what follows the first end-of-sequence token is left out.

    Args:
        eos_ids: ids that end a sequence.
    """
    end = next((index + 1 for index, token in enumerate(response_ids) if token in eos_ids), None)
    visible = list(response_ids[:end])
    pad = tokenizer.pad_token_id
    if pad is not None and pad not in eos_ids:
        visible = [token for token in visible if token != pad]
    return continuation_text(tokenizer, prompt_ids, visible)


def end_of_sequence_ids(tokenizer: Tokenizer, more: Collection[int] = ()) -> frozenset[int]:
    """Returns all ids that end a sequence: the tokenizer's own, and `more` that a model's configuration lists."""
    return frozenset(more) | {token for token in (tokenizer.eos_token_id,) if token is not None}
