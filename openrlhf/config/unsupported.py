"""Features that flags exist for but that can't be had yet: refused with the reason, never ignored.

An entry leaves this table when its feature is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from openrlhf.config.flag import flag_specs
from openrlhf.config.problems import Violation


class NotYet(NamedTuple):
    """Why any value but the default is refused, and what to do instead."""

    reason: str
    instead: str


NOT_YET: dict[str, NotYet] = {
    "ring_head_stride": NotYet(
        "there is no ring that keys and values of some heads at a time pass through: the ranks that share a sequence "
        "exchange all heads at once",
        "leave it out",
    ),
    "deepcompile": NotYet("DeepCompile is not available", "leave it out"),
    "vllm_sync_with_ray": NotYet(
        "weights are never sent through Ray's collectives", "leave it out: --vllm_sync_backend chooses the way"
    ),
}


def unsupported(cfg: Any) -> list[Violation]:
    """A violation for each feature that the configuration asks for and that can't be had."""
    specs = flag_specs(type(cfg))
    asked = [flag for flag in NOT_YET if flag in specs and getattr(cfg, flag) != specs[flag].default]
    return [Violation(flag, *NOT_YET[flag]) for flag in asked]
