"""The byte layout of a weight transfer."""

from __future__ import annotations

import pytest
import torch

from openrlhf.engines.weight_sync.layout import TensorMeta, pack, unpack


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
