"""Small helpers, and the names that users' files import from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.rollout.rewards.builtin import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]


def __getattr__(name: str) -> Any:
    """Loads the answer helpers when they are asked for, so that importing a helper module stays cheap."""
    if name in __all__:
        from openrlhf.rollout.rewards import builtin

        return getattr(builtin, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
