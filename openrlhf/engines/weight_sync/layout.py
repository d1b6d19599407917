"""How named tensors are laid out in the flat byte buffers that a transfer sends. Pure arithmetic.

Both ends derive the same layout from the same metadata, so a transfer needs no header per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorMeta:
    """Name, dtype and full shape of one tensor of a transfer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def pack(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors as bytes: uint8[sum of nbytes], always a fresh copy."""
    return torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` copies out of a buffer that :func:`pack` made.

    Copies, because a receiver may keep a tensor after the buffer is used for the next bucket.
    """
    offset = 0
    for meta in metas:
        # clone before viewing as a wider dtype: an offset need not be a multiple of the item size
        piece = buffer[offset : offset + meta.nbytes].clone()
        yield meta.name, piece.view(meta.dtype).view(meta.shape)
        offset += meta.nbytes
    if offset != buffer.numel():
        raise ValueError(f"buffer holds {buffer.numel()} bytes, its description says {offset}")
