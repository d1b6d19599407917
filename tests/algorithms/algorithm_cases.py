"""Random packed batches shared by the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

quick = settings(max_examples=40, deadline=None, derandomize=True)


@dataclass
class Batch:
    """Structure of a packed batch: multi-turn masks, uneven interleaved groups, sequences without actions."""

    masks: list[list[bool]]
    groups: list[int]
    seed: int

    @property
    def lengths(self) -> list[int]:
        return [len(mask) for mask in self.masks]

    @property
    def mask(self) -> Tensor:
        return torch.tensor([m for mask in self.masks for m in mask])

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        ends = np.cumsum(self.lengths).tolist()
        return [(end - n, end) for n, end in zip(self.lengths, ends, strict=True)]

    def normal(self, salt: int, scale: float = 1.0) -> Tensor:
        rng = np.random.default_rng([self.seed, salt])
        return torch.from_numpy(rng.normal(size=sum(self.lengths)) * scale)


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 7, max_length: int = 9) -> Batch:
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=max_length), min_size=1, max_size=max_sequences))
    groups = draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    return Batch(masks, groups, draw(st.integers(0, 2**31 - 1)))


def poison(column: Tensor, mask: Tensor) -> Tensor:
    """The column with NaN and huge values on every masked token."""
    junk = torch.tensor([float("nan"), 1e30, float("inf"), -1e30], dtype=column.dtype)
    return torch.where(mask, column, junk[torch.arange(column.numel()) % 4])
