"""Which kernel packed attention takes."""

from __future__ import annotations

import pytest
import torch

from openrlhf import platform
from openrlhf.models.attention import flash_attends

A100, A10, H100, T4 = (8, 0), (8, 6), (9, 0), (7, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [8, 64, 80, 128, 192, 256])
def test_usual_heads_go_by_flash_attention(dtype: torch.dtype, size: int) -> None:
    for capability in (A100, A10, H100, (12, 0)):
        assert flash_attends(dtype, size, capability)


@pytest.mark.parametrize(
    ("dtype", "size", "capability"),
    [
        (torch.float32, 64, H100),
        (torch.bfloat16, 64, T4),
        (torch.float16, 64, T4),
        (torch.bfloat16, 64, None),
        (torch.bfloat16, 36, H100),
        (torch.bfloat16, 264, H100),
        (torch.bfloat16, 512, H100),
        (torch.bfloat16, 224, A10),
    ],
)
def test_others_go_by_the_padded_one(dtype: torch.dtype, size: int, capability: tuple[int, int] | None) -> None:
    assert not flash_attends(dtype, size, capability)


def test_only_the_smaller_gpus_lack_room_for_heads_of_224() -> None:
    assert flash_attends(torch.bfloat16, 224, A100) and flash_attends(torch.bfloat16, 224, H100)


def test_a_cpu_has_no_capability() -> None:
    assert platform.compute_capability(torch.device("cpu")) is None
