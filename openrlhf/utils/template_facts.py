"""What a trial shows about a tokenizer's chat template, which is a program and says nothing about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Fact = TypeVar("Fact")


def template_fact(tokenizer: Any, name: str, trial: Callable[[], Fact]) -> Fact:
    """What ``trial`` found of the chat template that the tokenizer has now; it runs once for each template."""
    template = getattr(tokenizer, "chat_template", None)
    key = f"_openrlhf_{name}"
    known = tokenizer.__dict__.get(key, ())
    if known[:1] != (template,):
        known = (template, trial())
        tokenizer.__dict__[key] = known
    return known[1]
