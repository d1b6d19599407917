"""Tiny adapters and models for the tests of the small commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.models.loading import load_sequence_regression, load_tokenizer, write_hf_folder
from openrlhf.tools.loading import LoadSettings
from openrlhf.utils.tiny_model import make_tiny_model


def make_reward_model(folder: Path, prefix: str = "score", **config: Any) -> str:
    """A tiny reward model; ``config`` goes into its config.json."""
    base = make_tiny_model(folder.parent / f"{folder.name}_base")
    model = load_sequence_regression(base, LoadSettings(), init_head=True, head_prefix=prefix)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_hf_folder(model, state, folder, load_tokenizer(base), {"pad_token_id": 0, **config})
    return str(folder)


def with_adapter(base: str, folder: Path, *, is_rm: bool = False, scale: float = 0.05, **config: Any) -> nn.Module:
    """Save a random adapter for a model, and return the model that it makes (float32)."""
    auto = AutoModelForSequenceClassification if is_rm else AutoModelForCausalLM
    extra = {"num_labels": 1} if is_rm else {}
    model = auto.from_pretrained(base, dtype=torch.float32, **extra)
    task = "SEQ_CLS" if is_rm else "CAUSAL_LM"
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    adapted = get_peft_model(model, LoraConfig(task_type=task, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return adapted.eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """What a model says about some fixed tokens."""
    return model(input_ids=torch.arange(4, 24)[None], use_cache=False).logits[0].float()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def page(name: str) -> str:
    """A page of docs/."""
    return (Path(__file__).resolve().parents[2] / "docs" / name).read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words after ``openrlhf`` of each command line that a page shows."""
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("openrlhf ")]
