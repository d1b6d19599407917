"""Ids of a text that goes on from another one, whose ids are fixed."""

from __future__ import annotations

from typing import Any

# What a text is put behind to be encoded; the first of them that doesn't grow together with it is taken.
_STARTS = ("\n", "a", "0", ".")


def continued_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` that decode to just `text` after other ids.

    Encoded by itself a text gets a blank in front from tokenizers that mark the beginnings of words (SentencePiece).
    """
    return encode_continued(tokenizer, text)[0] if text else []


def encode_continued(tokenizer: Any, text: str) -> tuple[list[int], str]:
    """As :func:`continued_ids`, and the text that it was put behind."""
    for start in _STARTS:
        head = list(tokenizer.encode(start, add_special_tokens=False))
        whole = list(tokenizer.encode(start + text, add_special_tokens=False))
        if head and whole[: len(head)] == head and tokenizer.decode(head) == start:
            return whole[len(head) :], start
    return list(tokenizer.encode(text, add_special_tokens=False)), ""
