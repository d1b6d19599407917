"""Does a vLLM worker hold what the trainer sent? Asked tensor by tensor, of a second copy that came another way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of a worker that is not what it should be.

    Attributes:
        name: vLLM's name, which may stand for several tensors of the checkpoint (``qkv_proj``).
        differing: elements whose bits differ.
        elements: of the tensor.
        largest: the largest absolute difference; infinite where one of the two is not finite, or the shapes differ.
    """

    name: str
    differing: int
    elements: int
    largest: float


@dataclass(frozen=True)
class Comparison:
    """What a worker found: the number of its tensors and elements, and those tensors that differ."""

    tensors: int
    elements: int
    differences: list[TensorDifference]


def visible_weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, not copied, and copies of the weights that vLLM's CPU build keeps packed.

    A packed weight can't be read, but multiplying the identity with it gives it exactly: each product has one term
    that is not zero. Where the plain weight is still there (a tied head), both are returned, since both are used.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and isinstance(width := _input_width(layer), int):
            eye = torch.eye(width, dtype=layer.weight.dtype)
            weights[f"{name}.weight (packed)"] = layer.cpu_linear(eye, layer.weight, None).T.contiguous()
    return {name: tensor for name, tensor in weights.items() if tensor.numel() > 0}


def _input_width(layer: nn.Module) -> object:
    return getattr(layer, "input_size_per_partition", getattr(layer, "embedding_dim", None))


def compare(held: dict[str, Tensor], expected: dict[str, Tensor]) -> Comparison:
    """Compare bit by bit, on the device of ``expected``; a tensor that only one side has differs in every element."""
    differences = []
    for name in sorted(held.keys() | expected.keys()):
        one, other = held.get(name), expected.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            count = max(t.numel() for t in (one, other) if t is not None)
            differences.append(TensorDifference(name, count, count, float("inf")))
            continue
        one = one.to(other.device)
        bits = _BITS[one.element_size()]
        unequal = one.contiguous().view(bits) != other.contiguous().view(bits)
        if count := int(unequal.sum()):
            largest = float((one[unequal].double() - other[unequal].double()).abs().nan_to_num(nan=float("inf")).max())
            differences.append(TensorDifference(name, count, one.numel(), largest))
    return Comparison(len(expected), sum(tensor.numel() for tensor in expected.values()), differences)


def stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder of safetensors files, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)
