"""A real engine that admits, preempts and pauses: what it says of its tokens is what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from served_cases import check_ends, check_fp32_head, model_logprobs, serve, told_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.utils.tiny_model import make_tiny_model


@pytest.mark.e2e
def test_every_token_is_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3")
    served = serve(monkeypatch, folder, "fp32", 100)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_ends(served, tokenizer.eos_token_id, tokenizer.decode)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    errors = (told_logprobs(served) - model_logprobs(model, served)).abs()
    assert len(errors) > 2000 and errors.max() < 1e-4


@pytest.mark.e2e
def test_logits_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fp32_head(monkeypatch, tmp_path / "model")
