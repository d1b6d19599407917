"""4-bit base weights: what they stand for is what is computed, exported and merged; adapters on them train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import options, packed, sequences
from peft import PeftModel

from openrlhf.cli.lora_combiner import main as combine
from openrlhf.models.export import exported_weights
from openrlhf.models.loading import load_causal_lm, load_sequence_regression, load_tokenizer, write_hf_folder
from openrlhf.models.logprobs import PolicyModel, RewardModel
from openrlhf.utils.tiny_model import make_tiny_model

QLORA = {"lora_rank": 4, "load_in_4bit": True, "param_dtype": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("quantized"), "qwen2")


def trained(folder: str, **changes: object) -> tuple[torch.nn.Module, list[float]]:
    """A model after some steps on its adapters, and the losses."""
    torch.manual_seed(0)
    model = load_causal_lm(folder, options(**QLORA, **changes)).bfloat16()
    policy, batch = PolicyModel(model), packed(sequences())
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = -policy(batch).logprobs.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model.eval(), losses


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return PolicyModel(model)(packed(sequences())).logprobs


def test_the_forward_pass_is_that_of_the_dense_weights(folder: str) -> None:
    model = load_causal_lm(folder, options(**QLORA)).bfloat16()  # adapters start at 0
    kinds = {n: p.dtype for n, p in model.named_parameters() if p.dtype == torch.uint8}
    assert len(kinds) == 2 * 7 and all("base_layer.weight" in name for name in kinds)
    weights = list(exported_weights(model))
    assert all(w.dtype == torch.bfloat16 and w.shape == tuple(w.build().shape) for w in weights)
    dense = load_causal_lm(folder, options(param_dtype="bf16"))
    before = logprobs(dense)
    dense.load_state_dict({w.name: w.build() for w in weights})
    # another kernel: sums in bf16 are rounded elsewhere
    assert float((logprobs(dense) - logprobs(model)).abs().max()) < 0.02
    assert float((logprobs(dense) - before).abs().max()) > 0.1, "rounding to 4 bits shows"


@pytest.mark.parametrize("changes", [{}, {"target_modules": ["q_proj"]}, {"gradient_checkpointing": True}])
def test_adapters_train_are_saved_and_merged(folder: str, tmp_path: Path, changes: dict[str, object]) -> None:
    model, losses = trained(folder, **changes)
    assert losses[-1] < losses[0] - (0.1 if changes.get("target_modules") else 0.5), losses
    state = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    write_hf_folder(model, state, tmp_path / "lora", load_tokenizer(folder))
    base = load_causal_lm(folder, options(load_in_4bit=True, param_dtype="bf16"), trainable=False)
    again = PeftModel.from_pretrained(base, tmp_path / "lora").bfloat16().eval()
    assert torch.equal(logprobs(again), logprobs(model))
    if changes:
        return
    paths = ["--model_path", folder, "--lora_path", str(tmp_path / "lora"), "--output_path", str(tmp_path / "out")]
    assert combine([*paths, "--param_dtype", "bf16", "--verify"]) == 0
    merged = load_causal_lm(str(tmp_path / "out"), options(param_dtype="bf16"))
    for weight in exported_weights(model):
        assert torch.equal(merged.get_parameter(weight.name), weight.build()), weight.name


def test_heads_stay_whole(folder: str, tmp_path: Path) -> None:
    model = load_sequence_regression(folder, options(**QLORA)).bfloat16()
    heads = [p for n, p in model.named_parameters() if "score" in n]
    assert heads and all(p.dtype == torch.bfloat16 for p in heads)
    assert [n for n, p in model.named_parameters() if p.requires_grad and "score" in n]
    RewardModel(model)(packed(sequences())).scores.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
