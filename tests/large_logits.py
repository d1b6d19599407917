"""A model whose probabilities suffer when its logits are rounded to 16 bits."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM


def enlarge_logits(folder: str) -> None:
    """Give all logits of a token a common part of some 100, where bf16 has steps of 0.5; it moves no probability."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[:, 0] = 128  # times a number of about 1, another one for each token
    model.save_pretrained(folder)
