"""An engine on a GPU, with steps scheduled ahead: what it says of its tokens is what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from served_cases import check_ends, check_fp32_head, model_logprobs, serve, told_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_every_token_is_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", hidden=256, layers=4, heads=4, kv_heads=2)
    served = serve(monkeypatch, folder, "bf16", 600)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_ends(served, tokenizer.eos_token_id, tokenizer.decode)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    exact = model_logprobs(model, served)
    rounding = (model_logprobs(model.bfloat16(), served) - exact).abs()
    errors = (told_logprobs(served) - exact).abs()
    # The engine rounds in other places than the model. A key or value of another request is off by whole units.
    assert len(errors) > 12000
    assert errors.mean() < 1.5 * rounding.mean() and errors.max() < 3 * rounding.max() < 1


def test_logits_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fp32_head(monkeypatch, tmp_path / "model")
