"""Fused forms are used where they compute the same, and only there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from model_cases import options, packed, sequences
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.models.fused import can_fuse, fuse_elementwise
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture
def all_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused forms run, each as the function that a GPU would compile."""
    monkeypatch.setattr("openrlhf.models.fused.can_fuse", lambda device: True)
    monkeypatch.setattr("openrlhf.models.fused.fuse", lambda function: function)


@pytest.mark.usefixtures("all_fused")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_model_gives_the_same_values_and_gradients(
    tmp_path: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path / "m", arch)
    models = [load_causal_lm(folder, options()), load_causal_lm(folder, options())]
    namespace = sys.modules[type(models[0]).__module__]
    rotary = namespace.apply_rotary_pos_emb
    monkeypatch.setattr(namespace, "apply_rotary_pos_emb", rotary)  # put back at the end
    with torch.no_grad():
        for model in models:  # norm weights of 1 would hide a wrong form
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + torch.arange(parameter.numel()) / parameter.numel())
    outputs = [PolicyModel(models[0])(packed(sequences())).logprobs]
    norms = 2 * 4 + 1 if arch == "qwen3" else 2 * 2 + 1  # qwen3 has two more in each attention
    assert fuse_elementwise(models[1]) == norms + 2 + 1  # two MLPs, and the rotary embedding of all layers
    assert namespace.apply_rotary_pos_emb is not rotary
    outputs.append(PolicyModel(models[1])(packed(sequences())).logprobs)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    for output in outputs:
        output.sum().backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-4, rtol=1e-4)


def test_other_formulas_are_left_alone() -> None:
    """Gemma scales by 1 + weight and uses another activation."""
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config)
    before = [module.forward for module in model.modules()]
    fuse_elementwise(model)
    assert [module.forward for module in model.modules()] == before


def test_nothing_is_compiled_for_a_cpu() -> None:
    assert not can_fuse(torch.device("cpu"))


@pytest.mark.usefixtures("all_fused")
def test_a_model_that_turns_a_part_of_each_head_keeps_its_rotary_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function gives the same as the fused one on angles as wide as a head, and not on narrower ones."""
    from transformers.models.gpt_neox import modeling_gpt_neox as namespace

    monkeypatch.setattr(namespace, "apply_rotary_pos_emb", namespace.apply_rotary_pos_emb)  # put back at the end
    sizes = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    model = load_causal_lm(make_tiny_model(tmp_path / "m", "gpt_neox", **sizes), options())
    batch = packed(sequences())
    expected = PolicyModel(model)(batch).logprobs
    fuse_elementwise(model)  # type: ignore[arg-type]
    torch.testing.assert_close(PolicyModel(model)(batch).logprobs, expected, atol=1e-5, rtol=0)
