"""Losses of preference training in float64, from the papers, with plain transformers models: one sequence a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.datasets.order import epoch_permutation

BATCH = 8
SEED = 42


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batches(rows: list[dict[str, Any]], size: int = BATCH) -> list[list[dict[str, Any]]]:
    """The rows of each optimizer step of the first epoch."""
    order = [rows[i] for i in epoch_permutation(len(rows), SEED, 0)]
    return [order[i : i + size] for i in range(0, len(order), size)]


def weights_differ(runs: Path, one: str, other: str) -> float:
    """The largest difference between the weights that two runs saved."""
    first, second = (load_file(runs / name / "model" / "model.safetensors") for name in (one, other))
    kinds = [{key: (weight.shape, weight.dtype) for key, weight in each.items()} for each in (first, second)]
    assert kinds[0] == kinds[1]
    # Not Python's max, which can lose a NaN.
    return float(torch.stack([(first[key] - second[key]).abs().max() for key in first]).max())


def with_adapter(model: torch.nn.Module, adapter: Path | None) -> torch.nn.Module:
    """The model as it is, or with a LoRA adapter merged into it by peft."""
    return model if adapter is None else PeftModel.from_pretrained(model, adapter).merge_and_unload()


class Scorer:
    """Scores of texts by a stock sequence classification model."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
        self.model = with_adapter(model, adapter).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        return self.model(input_ids=torch.tensor([ids])).logits[0, 0]

    def gaps(self, rows: list[dict[str, Any]]) -> Tensor:
        """Chosen minus rejected, of each pair."""
        return torch.stack([self(r["prompt"] + r["chosen"]) - self(r["prompt"] + r["rejected"]) for r in rows])


class Policy:
    """Summed log-probs of answers by a stock causal language model."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model = with_adapter(model, adapter).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, prompt: str, answer: str) -> Tensor:
        head = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        tail = self.tokenizer(answer, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        logprobs = self.model(input_ids=torch.tensor([head + tail])).logits[0].log_softmax(-1)
        return sum(logprobs[len(head) + i - 1, token] for i, token in enumerate(tail))

    def ratios(self, reference: Policy, rows: list[dict[str, Any]], column: str) -> Tensor:
        """log pi - log ref of the answers in a column."""
        with torch.no_grad():
            base = torch.stack([reference(r["prompt"], r[column]) for r in rows])
        return torch.stack([self(r["prompt"], r[column]) for r in rows]) - base
