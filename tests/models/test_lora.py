"""Adapters: only they train, they are merged for engines, and saved alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from model_cases import options, packed, sequences
from peft import PeftModel
from transformers import AutoModelForCausalLM

from openrlhf.models.export import exported_weights
from openrlhf.models.folder import check_model_folder, require_head
from openrlhf.models.loading import (
    ModelLoadError,
    load_causal_lm,
    load_sequence_regression,
    write_hf_folder,
)
from openrlhf.models.logprobs import PolicyModel, ValueModel
from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("lora"), "qwen2")


def with_adapters(folder: str, **changes: object) -> torch.nn.Module:
    """A LoRA model whose adapters are not zero."""
    torch.manual_seed(0)
    model = load_causal_lm(folder, options(lora_rank=4, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def test_only_adapters_train(folder: str) -> None:
    model = with_adapters(folder)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in n for n in trainable)
    assert not any("lm_head" in n for n in trainable)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_reach_the_adapters_with_checkpointing(folder: str, reentrant: bool) -> None:
    model = with_adapters(folder, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=reentrant).train()
    PolicyModel(model)(packed(sequences())).logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_exported_weights_are_merged_and_named_as_the_base_model(folder: str, tmp_path: Path) -> None:
    model = with_adapters(folder)
    batch = packed(sequences())
    plain = AutoModelForCausalLM.from_pretrained(folder)
    weights = {w.name: w.build() for w in exported_weights(model)}
    assert set(weights) == {name for name, _ in plain.named_parameters()}
    assert all(w.shape == tuple(weights[w.name].shape) for w in exported_weights(model))
    write_hf_folder(plain, weights, tmp_path / "merged")
    merged = PolicyModel(load_causal_lm(str(tmp_path / "merged"), options()))
    with torch.no_grad():
        base = PolicyModel(load_causal_lm(folder, options()))(batch).logprobs
        expected = PolicyModel(model.eval())(batch).logprobs
        torch.testing.assert_close(merged(batch).logprobs, expected, atol=1e-5, rtol=0)
    assert float((base - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_merged_weights_are_rounded_once_and_the_base_never_changes(folder: str, adapters: torch.dtype) -> None:
    """``bf16(W + 2 B A)``, where alpha is twice the rank, whichever number format the adapters have."""
    model = load_causal_lm(folder, options(lora_rank=2, lora_alpha=4, param_dtype="bf16"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randint(-50, 51, parameter.shape, generator=generator).to(adapters) / 64
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    layer = "model.layers.0.self_attn.q_proj"
    matrix = {
        part: next(p.float() for n, p in before.items() if layer in n and part in n)
        for part in ("base_layer.weight", "lora_A", "lora_B")
    }
    expected = (matrix["base_layer.weight"] + 2 * (matrix["lora_B"] @ matrix["lora_A"])).bfloat16()
    for _ in range(50):
        exported = {weight.name: weight for weight in exported_weights(model)}
        assert not any("lora_" in name or "base_layer" in name for name in exported)
        assert torch.equal(exported[f"{layer}.weight"].build(), expected)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("reward", [False, True])
def test_adapters_are_told_from_models(folder: str, tmp_path: Path, reward: bool) -> None:
    load = load_sequence_regression if reward else load_causal_lm
    model = load(folder, options(lora_rank=2))
    write_hf_folder(model, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, tmp_path / "m")
    command = f"--model_path {folder} --lora_path {tmp_path}/m --output_path {tmp_path}/m_merged"
    for check in (check_model_folder, partial(require_head, head_prefix="score")):
        with pytest.raises(ModelLoadError, match="holds a LoRA adapter, not a model") as told:
            check(str(tmp_path / "m"))
        assert str(told.value).endswith(f"openrlhf lora_combiner {command}" + " --is_rm" * reward)
    (tmp_path / "m" / "config.json").unlink()  # adapters of other programs have none
    with pytest.raises(ModelLoadError, match="holds a LoRA adapter"):
        check_model_folder(str(tmp_path / "m"))


def test_saved_adapter_loads_with_stock_peft(folder: str, tmp_path: Path) -> None:
    model = with_adapters(folder)
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    write_hf_folder(model, adapters, tmp_path / "adapter")
    names = {p.name for p in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= names
    assert not {"model.safetensors", "README.md"} & names
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    ids = sequences((6,))[0][None]
    with torch.no_grad():
        expected = PolicyModel(model.eval())(packed([ids[0]])).logprobs[1:]
        logits = stock(input_ids=ids).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(logits.gather(1, ids[0, 1:, None])[:, 0], expected, atol=1e-5, rtol=0)


def test_value_head_trains_in_full_beside_adapters(folder: str) -> None:
    model = load_sequence_regression(folder, options(lora_rank=4))
    ValueModel(model)(packed(sequences())).sum().backward()
    head = [p for n, p in model.named_parameters() if "score" in n and p.requires_grad]
    assert len(head) == 1 and head[0].grad is not None and float(head[0].grad.abs().sum()) > 0
    assert "score.weight" in {w.name for w in exported_weights(model)}


def test_unknown_target_module_is_an_error(folder: str) -> None:
    """Also beside one that is there: peft would train that one alone."""
    words = (
        "--target_modules q_proj proj: the model has no 'proj'; it has embed_tokens, q_proj, k_proj, v_proj, o_proj, "
    )
    with pytest.raises(ModelLoadError, match=words):
        load_causal_lm(folder, options(lora_rank=4, target_modules=["q_proj", "proj"]))
    model = load_causal_lm(folder, options(lora_rank=4, target_modules=["self_attn.q_proj", "1.mlp.up_proj"]))
    adapted = {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert len(adapted) == 3
