"""Tiny models and options for the tests of models, engine and trainers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from openrlhf.batching import MicroBatch, pack

LENGTHS = (3, 9, 2, 1, 8)


def options(**changes: Any) -> Any:
    """The flags that models and the engine look at, at values fit for a test."""
    values: dict[str, Any] = {
        "param_dtype": "fp32",
        "attn_implementation": "auto",
        "packing_samples": True,
        "gradient_checkpointing": False,
        "gradient_checkpointing_every": 1,
        "gradient_checkpointing_use_reentrant": False,
        "use_liger_kernel": False,
        "load_in_4bit": False,
        "experts_implementation": None,
        "lora_rank": 0,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": ["all-linear"],
        "zero_stage": 2,
        "adam_offload": False,
        "zpg": 1,
        "overlap_comm": False,
        "grad_accum_dtype": None,
        "max_norm": 1.0,
        "seed": 0,
        "use_ds_universal_ckpt": False,
        "ring_attn_size": 1,
        "ds_tensor_parallel_size": 1,
    }
    return SimpleNamespace(**{**values, **changes})


def sequences(lengths: tuple[int, ...] = LENGTHS, vocabulary: int = 80, seed: int = 0) -> list[Tensor]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocabulary, (n,), generator=generator) for n in lengths]


def packed(items: list[Tensor]) -> MicroBatch:
    """All sequences in one micro-batch."""
    return pack(items, {}, range(len(items)))


def reference_logprobs(model: torch.nn.Module, items: list[Tensor]) -> Tensor:
    """Log-probs of all tokens, each sequence run alone through the plain transformers model; 0 at starts."""
    parts = []
    for ids in items:
        logits = model(input_ids=ids[None]).logits[0].double()
        logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1, dtype=torch.float64), logprobs]))
    return torch.cat(parts)
