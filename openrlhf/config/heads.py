"""Among how many ranks the attention heads of a model can be divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def fitting_sizes(heads: int, key_value_heads: int, shared: bool) -> list[int]:
    """Numbers of ranks that can share the heads equally, 1 included.

    Each rank needs as many query heads as the others, and the key-value heads that belong to them: either its own, or
    with ``shared`` one that it has in common with neighbours.
    """
    sizes = (n for n in range(1, heads + 1) if heads % n == 0)
    return [n for n in sizes if key_value_heads % n == 0 or (shared and n % key_value_heads == 0)]


def describe_heads(heads: int, key_value_heads: int, size: int) -> str:
    """The sentence about a model whose heads ``size`` ranks can't share."""
    return f"has {heads} attention heads and {key_value_heads} key-value heads, which {size} ranks can't share equally"


def heads_of(text: Any) -> tuple[int, int]:
    """Attention and key-value heads of a transformers text configuration."""
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def heads_of_folder(path: str) -> tuple[int, int] | None:
    """Attention and key-value heads as config.json of a local model says; None where it doesn't."""
    try:
        config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):  # a hub id, or a damaged folder, which loading explains
        return None
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads")
    return None if heads is None else (heads, text.get("num_key_value_heads") or heads)
