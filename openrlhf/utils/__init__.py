"""Small helpers, and the names that users' files import from here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.models.loading import get_tokenizer
    from openrlhf.rollout.rewards.builtin import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "get_tokenizer", "grade_answer"]

_HOMES = {
    "extract_boxed_answer": "openrlhf.rollout.rewards.builtin",
    "get_tokenizer": "openrlhf.models.loading",
    "grade_answer": "openrlhf.rollout.rewards.builtin",
}


def __getattr__(name: str) -> Any:
    """Loads such a name when it is asked for, so that importing a helper module stays cheap."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
