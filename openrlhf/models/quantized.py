"""Base weights in 4 bits (NF4 with double quantization, https://arxiv.org/abs/2305.14314) through bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.partition import full_shape


def nf4_config() -> Any:
    """How transformers loads the linear layers; heads stay whole, and what is computed is bf16."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
        llm_int8_skip_modules=["lm_head", "score"],
    )


def keep_layout(model: nn.Module) -> None:
    """On some CPUs bitsandbytes packs weights anew in evaluation, in a form that can't be trained on afterwards."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def is_quantized(parameter: Tensor) -> bool:
    """Whether the parameter holds 4-bit numbers."""
    return getattr(parameter, "quant_state", None) is not None


def dense_form(parameter: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and number format of the matrix that a parameter stands for."""
    if is_quantized(parameter):
        return tuple(parameter.quant_state.shape), parameter.quant_state.dtype
    return full_shape(parameter), parameter.dtype


def dense(parameter: Any) -> Tensor:
    """The matrix that a whole parameter stands for: its data, or what its 4-bit numbers mean."""
    if not is_quantized(parameter):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.detach().data, parameter.quant_state)
