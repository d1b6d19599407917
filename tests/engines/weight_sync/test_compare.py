"""Comparing a worker's tensors with those that were sent: a single planted element is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from openrlhf.engines.weight_sync.compare import compare, stored_weights, visible_weights
from openrlhf.trainer.weight_check import WeightMismatchError, check_tensors


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(5, 7), "b": torch.randn(3, dtype=torch.bfloat16), "c": torch.arange(4)}


@pytest.mark.parametrize(("name", "value"), [("a", 1.5), ("b", 1.5), ("c", 9)])
def test_a_single_planted_element_is_found(name: str, value: float) -> None:
    expected, held = weights(), weights()
    assert compare(held, expected).differences == []
    before = float(held[name].flatten()[2])
    held[name].view(-1)[2] = value
    found = compare(held, expected)
    assert (found.tensors, found.elements) == (3, 42)
    (difference,) = found.differences
    assert (difference.name, difference.differing, difference.elements) == (name, 1, expected[name].numel())
    assert difference.largest == pytest.approx(abs(value - before), rel=1e-2)
    with pytest.raises(WeightMismatchError, match=rf"(?s)1 of 3 tensors of engine 1 \(worker 0\).*{name}: 1 of"):
        check_tensors([[compare(weights(), weights())], [found]])
    assert check_tensors([[compare(weights(), weights())] * 2]) == {
        "sync/compared_tensors": 6.0,
        "sync/differing_elements": 0.0,
    }


def test_nan_zero_signs_missing_tensors_and_other_shapes_count() -> None:
    expected = {"nan": torch.tensor([1.0, 2.0]), "zero": torch.zeros(2), "gone": torch.ones(3), "shape": torch.ones(4)}
    held = {"nan": torch.tensor([1.0, float("nan")]), "zero": -torch.zeros(2), "shape": torch.ones(2, 2)}
    found = {d.name: (d.differing, d.elements, d.largest) for d in compare(held, expected).differences}
    infinite = float("inf")
    assert found == {
        "nan": (1, 2, infinite),
        "zero": (2, 2, 0.0),
        "gone": (3, 3, infinite),
        "shape": (4, 4, infinite),
    }
    same = {"nan": torch.tensor([float("nan")])}
    assert compare(same, {"nan": same["nan"].clone()}).differences == []


class PackedLinear(nn.Module):
    """As vLLM's linear layers on a CPU: the weight is empty, and a closure multiplies with a packed copy."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.input_size_per_partition = weight.shape[1]
        self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype))
        self.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_are_read_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(6, 4, dtype=dtype)
    layer = nn.ModuleDict({"norm": nn.LayerNorm(4, dtype=dtype), "proj": PackedLinear(weight)})
    visible = visible_weights(layer)
    assert sorted(visible) == ["norm.bias", "norm.weight", "proj.weight (packed)"]
    assert torch.equal(visible["proj.weight (packed)"], weight)


def test_files_are_read_in_order(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "00001.safetensors")
    save_file({"y": torch.zeros(3)}, tmp_path / "00000.safetensors")
    assert [(name, t.numel()) for name, t in stored_weights(tmp_path)] == [("y", 3), ("x", 2)]
