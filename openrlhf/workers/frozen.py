"""Weights that nobody trains leave the GPU and come back: there is nothing to copy on the way out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from openrlhf.models.partition import is_partitioned


class FrozenWeights:
    """Moves parameters and buffers between a GPU and one pinned copy in CPU memory.

    The weights never change, so they are copied to the CPU once, at the first :meth:`to_cpu`; later ones only drop the
    GPU's copy. Pinned memory comes back at the speed of the bus. Tied parameters stay tied: what is moved is the
    parameter's data, once. Of parameters that ZeRO-3 has spread over ranks, it is this rank's part.

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
            self._copies = [t.data.cpu().pin_memory() for t in self._tensors]
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.data = copy

    def to_device(self) -> None:
        """Bring the weights to the GPU; kernels that are queued afterwards see them there."""
        if self._device.type == "cpu":
            return
        for tensor in self._tensors:
            tensor.data = tensor.data.to(self._device, non_blocking=True)


def own_parts(parameter: Tensor) -> list[Tensor]:
    """What this rank holds of a parameter; with ``--zpg`` also its part of the copy within a node."""
    if not is_partitioned(parameter):
        return [parameter]
    parts = [getattr(parameter, name, None) for name in ("ds_tensor", "ds_secondary_tensor")]
    return [part for part in parts if isinstance(part, Tensor)]
