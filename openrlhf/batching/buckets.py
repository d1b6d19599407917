"""Which weights are gathered and sent together, so that the memory it takes does not grow with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024


class Sized(Protocol):
    """Something of a known size."""

    @property
    def nbytes(self) -> int: ...


def plan_buckets(metas: Sequence[Sized], limit_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[int]]:
    """Group consecutive tensors into buckets of at most ``limit_bytes``.

    Args:
        metas: what is sent, in order.
        limit_bytes: capacity of a bucket; a single larger tensor gets a bucket of its own.

    Returns:
        Indices into ``metas``, bucket by bucket, each index exactly once and in order.
    """
    if limit_bytes <= 0:
        raise ValueError(f"limit_bytes must be positive, got {limit_bytes}")
    buckets: list[list[int]] = []
    used = 0
    for index, meta in enumerate(metas):
        if not buckets or used + meta.nbytes > limit_bytes:
            buckets.append([])
            used = 0
        buckets[-1].append(index)
        used += meta.nbytes
    return buckets
