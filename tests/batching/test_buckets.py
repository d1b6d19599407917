"""Which tensors go together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.batching.buckets import in_buckets


@dataclass(eq=False)
class Weight:
    nbytes: int


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    limit=st.integers(1, 120),
)
def test_buckets_hold_every_tensor_once_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    weights = [Weight(size) for size in sizes]
    buckets = in_buckets(weights, limit)
    assert list(chain.from_iterable(buckets)) == weights
    for bucket in buckets:
        assert bucket
        assert sum(weight.nbytes for weight in bucket) <= limit or len(bucket) == 1
    for bucket, following in pairwise(buckets):  # a bucket ends only where the next tensor does not fit
        assert sum(weight.nbytes for weight in [*bucket, following[0]]) > limit
