"""Weights as they leave the trainer: their names, what adapters do to them, and the check before they are written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from model_cases import options, packed, sequences
from safetensors.torch import load_file, save_file

from openrlhf.models.export import exported_weights, is_finite
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.utils.tiny_model import make_tiny_model


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


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("arch", EXPERTS)
def test_experts_are_exported_as_the_folder_has_them(tmp_path: Path, arch: str, rank: int) -> None:
    """With adapters on them merged: what comes out loads as a model that says the same."""
    folder = Path(make_tiny_model(tmp_path / "model", arch, **EXPERTS[arch]))
    model = load_causal_lm(str(folder), options(lora_rank=rank))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    exported = exported_weights(model)
    tensors = dict(named for weight in exported for named in weight.tensors())
    assert [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == [p for w in exported for p in w.parts()]
    written = load_file(folder / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in written.items()}
    save_file(tensors, folder / "model.safetensors")
    batch = packed(sequences((3, 9, 2)))
    with torch.no_grad():
        expected = PolicyModel(model)(batch).logprobs
        got = PolicyModel(load_causal_lm(str(folder), options()))(batch).logprobs
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
