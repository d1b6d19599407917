"""Log-probs depend on the weights and the sequence alone; models for which they would not are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import options, packed, sequences
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrlhf.models.attention import PackingError
from openrlhf.models.loading import ModelLoadError, load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.utils.tiny_model import make_tiny_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 8,
}
LONG = {"hidden": 32, "heads": 4, "kv_heads": 4, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8}


def logprobs(path: str, *lengths: int, packing: bool = False, **changes: Any) -> Tensor:
    model = load_causal_lm(path, options(packing_samples=packing, **changes))
    with torch.no_grad():
        return PolicyModel(model, packing=packing)(packed(sequences(lengths))).logprobs


@torch.no_grad()
def stock(path: str, length: int) -> Tensor:
    """By transformers' own model with its eager attention, ``[T]``."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.as_tensor(sequences((length,))[0])[None].long()
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


def test_capped_attention_is_not_left_to_sdpa(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "gemma2", attn_logit_softcapping=1.0)
    torch.testing.assert_close(logprobs(path, 9), stock(path, 9), atol=1e-5, rtol=0)
    with pytest.raises(ModelLoadError, match="sdpa leaves out the cap.*use eager"):
        logprobs(path, 9, attn_implementation="sdpa")


@pytest.mark.parametrize("packing", [True, False])
def test_long_factors_do_not_come_and_go_with_the_neighbours(tmp_path: Path, packing: bool) -> None:
    path = make_tiny_model(tmp_path / "m", "phi3", **LONG)
    short, long = (logprobs(path, 5, *more, packing=packing, max_len=24)[:5] for more in ((), (20,)))
    torch.testing.assert_close(long, short, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(path, 20, packing=packing, max_len=24), stock(path, 20), atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(path, 5, packing=packing, max_len=8), stock(path, 5), atol=1e-5, rtol=0)


def test_scaling_by_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    path = make_tiny_model(tmp_path / "m", "llama", rope_parameters=rope, max_position_embeddings=8)
    with pytest.raises(ModelLoadError, match="dynamic NTK.*use --max_len 8 instead of 9"):
        load_causal_lm(path, options(max_len=9))
    torch.testing.assert_close(logprobs(path, 8, max_len=8), stock(path, 8), atol=1e-5, rtol=0)


def test_routers_have_no_noise(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "mixtral", router_jitter_noise=0.3, **EXPERTS)
    model = PolicyModel(load_causal_lm(path, options()).train())
    batch = packed(sequences((9, 5)))
    assert torch.equal(model(batch).logprobs, model(batch).logprobs)


def test_something_between_the_layers_and_the_output_layer(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "modernbert-decoder", local_attention=8)
    with pytest.raises(ModelLoadError, match="beside its layers and output layer"):
        load_causal_lm(path, options())


@pytest.mark.parametrize(
    ("arch", "sizes", "message"),
    [
        ("phimoe", {**EXPERTS, "sliding_window": 4}, "does not pass its sliding window"),
        ("doge", {}, "makes an attention mask of its own"),
        ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 64}, "carries state"),
        ("llama4_text", {**EXPERTS, "attention_chunk_size": 4, "intermediate_size_mlp": 32}, "chunked_attention"),
    ],
)
def test_packing_is_refused_where_sequences_would_meet(
    tmp_path: Path, arch: str, sizes: dict[str, Any], message: str
) -> None:
    path = make_tiny_model(tmp_path / "m", arch, **sizes)
    with pytest.raises(PackingError, match=f"{message}.*without --packing_samples"):
        logprobs(path, 9, 5, packing=True)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_packs_nothing(tmp_path: Path, attention: str) -> None:
    path = make_tiny_model(tmp_path / "m", "qwen2")
    with pytest.raises(PackingError, match=f"{attention} can't keep packed samples apart"):
        load_causal_lm(path, options(attn_implementation=attention))


def test_layers_that_can_have_no_adapter(tmp_path: Path) -> None:
    experts = make_tiny_model(tmp_path / "experts", "mixtral", **EXPERTS)
    with pytest.raises(ModelLoadError, match="on experts can't have --lora_dropout 0.1; use 0"):
        load_causal_lm(experts, options(lora_rank=2, lora_dropout=0.1))
    tied = make_tiny_model(tmp_path / "tied", "qwen2", tie=True)
    with pytest.raises(ModelLoadError, match="the embedding is the output layer too"):
        load_causal_lm(tied, options(lora_rank=2, target_modules=["embed_tokens"]))
    with pytest.raises(ModelLoadError, match="can't be on the output layer"):
        load_causal_lm(make_tiny_model(tmp_path / "m"), options(lora_rank=2, target_modules=["q_proj", "lm_head"]))
