"""Weights that nobody trains leave the GPU and come back: there is nothing to copy on the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf.models.partition import is_partitioned

BUFFER_BYTES = 1 << 30
"""Size of the pinned buffers that many weights share."""

_ALIGNMENT = 512


class FrozenWeights:
    """Moves parameters and buffers between a GPU and one pinned copy in CPU memory.

    The weights never change, so they are copied to the CPU once, at the first :meth:`to_cpu`; later ones only drop the
    GPU's copy. Pinned memory comes back at the speed of the bus. Tied parameters stay tied: what is moved is the
    parameter's data, once. Of parameters that ZeRO-3 has spread over ranks, it is this rank's part; with weights of
    4 bits go their scales.

    Args:
        weights: frozen for as long as this object is used.
        device: a CUDA device; with a CPU nothing moves.
    """

    def __init__(self, weights: Iterable[Tensor], device: torch.device) -> None:
        self._tensors = [part for weight in weights for part in own_parts(weight)]
        self._device = device
        self._copies: list[Tensor] | None = None

    def to_cpu(self) -> None:
        """Free the GPU memory of the weights."""
        if self._device.type == "cpu":
            return
        if self._copies is None:
            self._copies = packed_copies([t.data for t in self._tensors], pin_memory=True)
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.data = copy

    def to_device(self) -> None:
        """Bring the weights to the GPU; kernels that are queued afterwards see them there."""
        if self._device.type == "cpu":
            return
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device, non_blocking=True)


def own_parts(parameter: Tensor) -> list[Tensor]:
    """What this rank holds of a parameter.

    With ``--zpg`` it is also the part of the copy within a node, with ``--load_in_4bit`` the scales (bitsandbytes keeps
    them beside the parameter; with double quantization they have scales of their own).
    """
    parts: list[Any] = [parameter]
    if is_partitioned(parameter):
        parts = [getattr(parameter, name, None) for name in ("ds_tensor", "ds_secondary_tensor")]
    state = getattr(parameter, "quant_state", None)
    nested = getattr(state, "state2", None)
    parts += [getattr(state, "absmax", None), getattr(nested, "absmax", None)]
    return [part for part in parts if isinstance(part, Tensor)]


def packed_copies(tensors: Sequence[Tensor], pin_memory: bool) -> list[Tensor]:
    """Copies in CPU memory that share few buffers, each of a power of two bytes.

    PyTorch rounds every pinned allocation up to a power of two: one per weight would take up to twice the memory.
    """
    buffers, places = buffer_places([t.nbytes for t in tensors])
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory) for size in buffers]
    copies = []
    for tensor, (buffer, start) in zip(tensors, places, strict=True):
        copy = memory[buffer][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
    return copies


def buffer_places(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Where to put things of these sizes: large ones first, then what fits into the rest.

    Returns:
        The sizes of the buffers, powers of two, and for each thing the index of its buffer and where it starts there.
    """
    buffers: list[int] = []
    places = [(0, 0)] * len(sizes)
    padded = [-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left = sorted(range(len(sizes)), key=lambda index: padded[index], reverse=True)
    while left:
        # The largest power of two that what is left fills, and one into which the largest goes.
        filled = 1 << (sum(padded[index] for index in left).bit_length() - 1)
        capacity = max(min(BUFFER_BYTES, filled), 1 << (padded[left[0]] - 1).bit_length())
        used, later = 0, []
        for index in left:
            if used + padded[index] <= capacity:
                places[index] = (len(buffers), used)
                used += padded[index]
            else:
                later.append(index)
        buffers.append(capacity)
        left = later
    return buffers, places
