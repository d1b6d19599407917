"""Which tensors go together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.batching.buckets import plan_buckets


@dataclass
class Weight:
    nbytes: int


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    limit=st.integers(1, 120),
)
def test_buckets_hold_every_tensor_once_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    buckets = plan_buckets([Weight(size) for size in sizes], limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket
        assert sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1
    for bucket, following in pairwise(buckets):  # a bucket ends only where the next tensor does not fit
        assert sum(sizes[i] for i in [*bucket, following[0]]) > limit


def test_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="limit_bytes must be positive"):
        plan_buckets([], 0)
