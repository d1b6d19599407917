"""The check of weights before they are written."""

from __future__ import annotations

import math

import pytest
import torch

from openrlhf.models.export import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 8, 33, 1000])
def test_one_bad_element_is_found(dtype: torch.dtype, size: int) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for place in {0, size // 2, size - 1}:
            weight = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert is_finite(weight)
            weight[place] = bad
            assert not is_finite(weight)


@pytest.mark.parametrize("weight", [torch.zeros(0), torch.tensor([True, False]), torch.arange(3), torch.tensor(2.0)])
def test_buffers_of_any_kind_are_looked_at(weight: torch.Tensor) -> None:
    assert is_finite(weight)
