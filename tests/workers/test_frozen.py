"""Copies of frozen weights in few buffers."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from openrlhf.workers.frozen import buffer_places, own_parts, packed_copies

QWEN_7B = [
    *[152064 * 3584] * 2,
    *[count for _ in range(28) for count in (*[18944 * 3584] * 3, *[3584 * 3584] * 2, *[512 * 3584] * 2)],
    *[count for _ in range(28) for count in (3584, 512, 512, 3584, 3584)],
    3584,
]


def test_copies_equal_their_tensors_and_share_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1000, 77), (3,), (), (0, 5), (513, 2), (64, 64, 3), (1,)]
    tensors: list[Tensor] = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [tensors[0].bfloat16(), tensors[4].t(), torch.arange(9, dtype=torch.uint8), torch.ones(2).expand(4, 2)]
    copies = packed_copies(tensors, pin_memory=False)
    assert all(
        torch.equal(copy, tensor) and copy.dtype == tensor.dtype for copy, tensor in zip(copies, tensors, strict=True)
    )
    storages = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies}
    assert all(size.bit_count() == 1 for size in storages.values()) and len(storages) < len(tensors) - 1


@pytest.mark.parametrize("seed", range(20))
def test_nothing_overlaps(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [int(2 ** chance.uniform(0, 31.5)) for _ in range(chance.randrange(1, 60))]
    buffers, places = buffer_places(sizes)
    for buffer, capacity in enumerate(buffers):
        assert capacity.bit_count() == 1
        spans = sorted((start, start + size) for size, (b, start) in zip(sizes, places, strict=True) if b == buffer)
        assert spans and spans[0][0] == 0 and spans[-1][1] <= capacity
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_seven_billion_weights_take_little_more_than_they_are() -> None:
    sizes = [2 * count for count in QWEN_7B]
    buffers, _ = buffer_places(sizes)
    alone = sum(1 << (size - 1).bit_length() for size in sizes)
    assert sum(sizes) == 15_231_233_024
    assert sum(buffers) < 1.05 * sum(sizes) and alone > 1.7 * sum(sizes)


def test_nothing_to_copy_takes_nothing() -> None:
    assert packed_copies([], pin_memory=False) == []


def test_weights_of_four_bits_go_with_their_scales() -> None:
    weight: Any = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    inner, outer = torch.ones(1), torch.ones(4, dtype=torch.uint8)
    weight.quant_state = SimpleNamespace(absmax=outer, state2=SimpleNamespace(absmax=inner))
    assert [part.data_ptr() for part in own_parts(weight)] == [t.data_ptr() for t in (weight, outer, inner)]
    weight.quant_state = SimpleNamespace(absmax=outer, state2=None)
    assert [part.data_ptr() for part in own_parts(weight)] == [t.data_ptr() for t in (weight, outer)]
    weight.ds_id, weight.ds_tensor = 0, torch.zeros(4, dtype=torch.uint8)  # of ZeRO-3, which spreads no scales
    assert [part.data_ptr() for part in own_parts(weight)] == [t.data_ptr() for t in (weight.ds_tensor, outer)]
