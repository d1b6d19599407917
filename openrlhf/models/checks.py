"""What must be known of a model before it trains: log-probs that depend on the weights and the sequence alone."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from openrlhf.utils.errors import ExplainedError


class ModelLoadError(ExplainedError, RuntimeError):
    """A model or tokenizer can't be read or used; the message names the path and what is wrong with it."""


_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings)$")


def padded_attention(auto_class: Any, config: PretrainedConfig, requested: str) -> str:
    """``sdpa``, or ``eager`` for a model that sdpa can't do.

    Raises:
        ModelLoadError: ``sdpa`` was asked for by name, and would leave out the cap of the scores.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and requested == "sdpa":
        raise ModelLoadError(
            f"--attn_implementation sdpa leaves out the cap of the attention scores of {config.model_type}; use eager"
        )
    model_class = auto_class._model_mapping.get(type(config), None)
    return "eager" if capped or not getattr(model_class, "_supports_sdpa", True) else "sdpa"


def check_positions(model: PreTrainedModel, path: str, max_len: int) -> None:
    """Refuse more tokens than there are learned positions: behind the end of the table a GPU stops with an assertion.

    Raises:
        ModelLoadError: tells what to do.
    """
    tables = (name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    learned = any(_POSITIONS.search(name) for name in tables)
    limit = model.config.get_text_config().max_position_embeddings if learned else max_len
    if max_len > limit:
        raise ModelLoadError(f"{path!r} has positions for {limit} tokens; use --max_len {limit} instead of {max_len}")


def fix_rotary(model: PreTrainedModel, path: str, max_len: int) -> None:
    """Let a sequence's positions not depend on how long its neighbours in the row are.

    LongRoPE (https://arxiv.org/abs/2402.13753) takes its long factors throughout when ``max_len`` tokens need them, as
    vLLM does, and else the short ones.

    Args:
        max_len: longest sequence of the run.

    Raises:
        ModelLoadError: the scaling follows the length continuously (dynamic NTK).
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            config: Any = module.config
            short = config.rope_parameters["original_max_position_embeddings"]
            if max_len > short:
                factors, _ = ROPE_INIT_FUNCTIONS[kind](config, module.inv_freq.device, seq_len=short + 1)
                module.register_buffer("inv_freq", factors, persistent=False)
        elif kind == "dynamic":
            limit = int(module.original_max_seq_len)
            if max_len > limit:
                raise ModelLoadError(
                    f"{path!r} scales positions by the longest sequence in a row beyond {limit} tokens (dynamic NTK): "
                    f"log-probs would depend on neighbours; use --max_len {limit} instead of {max_len}"
                )
        else:
            continue
        module.rope_type = "fixed"  # transformers changes it no more


def check_output(model: PreTrainedModel, path: str) -> None:
    """Refuse a model with something between its layers and its output layer, which log-probs are computed without.

    Raises:
        ModelLoadError: names the parts.
    """
    known = {id(base_model(model)), id(model.get_output_embeddings()), id(getattr(model, "score", None))}
    others = [n for n, part in model.named_children() if id(part) not in known and any(True for _ in part.parameters())]
    if others:
        raise ModelLoadError(
            f"{path!r} is a {type(model).__name__}, which has {', '.join(others)} beside its layers and output layer; "
            "such models can't be trained here"
        )


def base_model(model: PreTrainedModel) -> nn.Module:
    """The model without its head. Some classes name another attribute than they have."""
    named = getattr(model, model.base_model_prefix, None)
    return named if isinstance(named, nn.Module) else model.model
