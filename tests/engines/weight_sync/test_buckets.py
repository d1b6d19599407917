"""The byte layout of a weight transfer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.engines.weight_sync.buckets import TensorMeta, pack, plan_buckets, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    limit=st.integers(1, 120),
)
def test_buckets_hold_every_tensor_once_in_order_and_keep_the_limit(sizes: list[int], limit: int) -> None:
    metas = [TensorMeta(f"w{i}", torch.int8, (size,)) for i, size in enumerate(sizes)]
    buckets = plan_buckets(metas, limit)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket
        assert sum(sizes[i] for i in bucket) <= limit or len(bucket) == 1


def test_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="limit_bytes must be positive"):
        plan_buckets([], 0)


def test_pack_and_unpack_give_the_same_bits_for_mixed_dtypes_and_odd_offsets() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randint(-128, 127, (3,), dtype=torch.int8),  # leaves the next tensor at an odd offset
        torch.randn(5, 7),
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.randn(4, 6).t(),  # not contiguous
        torch.empty(0, 4, dtype=torch.float16),
        torch.randn((), dtype=torch.float32),
    ]
    metas = [TensorMeta(f"w{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(tensors)]
    buffer = pack(tensors)
    received = dict(unpack(buffer, metas))
    buffer.zero_()  # copies must survive the next use of the buffer
    for meta, tensor in zip(metas, tensors, strict=True):
        assert received[meta.name].dtype == tensor.dtype
        assert torch.equal(received[meta.name], tensor)


def test_a_buffer_of_the_wrong_size_is_an_error() -> None:
    metas = [TensorMeta("w", torch.float32, (2,))]
    with pytest.raises(ValueError, match="buffer holds 12 bytes, its description says 8"):
        list(unpack(torch.zeros(12, dtype=torch.uint8), metas))
