"""Features that flags exist for but that can't be had yet: refused with the reason, never ignored.

An entry leaves this table when its feature is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from openrlhf.config.flag import flag_specs
from openrlhf.config.problems import Violation


class NotYet(NamedTuple):
    """When the flag asks for the missing feature, why it is refused, and what to do instead."""

    asked: Callable[[Any], bool]
    reason: str
    instead: str


NOT_YET: dict[str, NotYet] = {
    "ring_head_stride": NotYet(
        lambda cfg: cfg.ring_head_stride != 1,
        "there is no ring that keys and values of some heads at a time pass through: the ranks that share a sequence "
        "exchange all heads at once",
        "leave it out",
    ),
    "deepcompile": NotYet(lambda cfg: cfg.deepcompile, "DeepCompile is not available", "leave it out"),
    "vllm_sync_with_ray": NotYet(
        lambda cfg: cfg.vllm_sync_with_ray,
        "weights are never sent through Ray's collectives",
        "leave it out: --vllm_sync_backend chooses the way",
    ),
}


def unsupported(cfg: Any) -> list[Violation]:
    """A violation for each feature that the configuration asks for and that can't be had."""
    return [
        Violation(flag, entry.reason, entry.instead)
        for flag, entry in NOT_YET.items()
        if flag in flag_specs(type(cfg)) and entry.asked(cfg)
    ]
