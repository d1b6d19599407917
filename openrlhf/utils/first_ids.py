"""Ids of a text that begins a sequence: BOS once, and still there where the beginning is cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts BOS before a text by itself."""
    known = tokenizer.__dict__.get("_openrlhf_adds_bos")
    if known is None:
        probe = tokenizer.encode("a", add_special_tokens=True)
        known = bool(probe) and probe[0] == tokenizer.bos_token_id
        tokenizer.__dict__["_openrlhf_adds_bos"] = known
    return known


def first_ids(tokenizer: Any, text: str, like: Sequence[int] = ()) -> list[int]:
    """Ids of a text that begins a sequence, without EOS.

    Args:
        like: ids of a prompt of the same run: BOS comes first, once, where they begin with it. A chat template may have
            written it there, or left it out where the tokenizer alone would put it. Without them the tokenizer decides.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None or ids[:1] == [bos]:
        return ids
    wanted = like[0] == bos if like else adds_bos(tokenizer)
    return [bos, *ids] if wanted else ids


def last_ids(tokenizer: Any, ids: Sequence[int], limit: int) -> list[int]:
    """The last `limit` ids of a sequence that is too long; a BOS at its beginning stays there."""
    kept = list(ids[max(0, len(ids) - limit) :])
    bos = getattr(tokenizer, "bos_token_id", None)
    if kept and bos is not None and ids[0] == bos:
        kept[0] = bos
    return kept
