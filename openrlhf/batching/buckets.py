"""Which weights are gathered and sent together, so that the memory it takes does not grow with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024


class Sized(Protocol):
    """Something of a known size."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def in_buckets(items: Sequence[S], limit_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[S]]:
    """Consecutive items in buckets of at most ``limit_bytes``; a single larger one gets a bucket of its own."""
    buckets: list[list[S]] = []
    used = 0
    for item in items:
        if not buckets or used + item.nbytes > limit_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(item)
        used += item.nbytes
    return buckets
