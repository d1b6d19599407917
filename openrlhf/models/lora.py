"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) through peft."""

from __future__ import annotations

from typing import Any

from torch import nn

from openrlhf.config.options_model import ModelOptions

EVERY_LINEAR: tuple[list[str], ...] = ([], ["all-linear"])
"""Values of ``--target_modules`` that name no layer."""


def is_peft(model: nn.Module) -> bool:
    """Whether peft wraps this model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def check_targets(model: nn.Module, targets: list[str]) -> None:
    """See that a model has layers of these names; its weights are not looked at.

    Raises:
        ValueError: it has not; says which it has.
    """
    from transformers.pytorch_utils import Conv1D

    if targets in EVERY_LINEAR:
        return
    modules = dict(model.named_modules())
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in modules)]
    if missing:
        layers = (nn.Linear, nn.Embedding, Conv1D)
        there = dict.fromkeys(name.rpartition(".")[2] for name, module in modules.items() if isinstance(module, layers))
        raise ValueError(f"the model has no {', '.join(map(repr, missing))}; it has {', '.join(there)}")


def add_lora(model: nn.Module, opts: ModelOptions, task: str) -> nn.Module:
    """Freeze a model and add trainable adapters to the named linear layers, which may be in 4 bits.

    Args:
        opts: rank, alpha, dropout and target modules (``all-linear`` or a list of names).
        task: ``CAUSAL_LM``, or ``SEQ_CLS``, whose head is then trained in full.

    Raises:
        ValueError: no module has one of the given names; says which have.
    """
    from peft import LoraConfig, get_peft_model

    check_targets(model, opts.target_modules)
    targets: Any = "all-linear" if opts.target_modules in EVERY_LINEAR else opts.target_modules
    config = LoraConfig(
        r=opts.lora_rank,
        lora_alpha=opts.lora_alpha,
        lora_dropout=opts.lora_dropout,
        target_modules=targets,
        task_type=task,
        bias="none",
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        if "lora_dropout" not in str(error):
            raise
        raise ValueError(
            f"adapters on experts can't have --lora_dropout {opts.lora_dropout}; use 0, or name other layers"
        ) from error
    _check_ends(model)
    return adapted


def _check_ends(model: Any) -> None:
    """Refuse adapters on the output layer, which log-probs are computed without, and on an embedding tied to it."""
    from peft.tuners.lora import LoraLayer

    if isinstance(model.get_output_embeddings(), LoraLayer):
        raise ValueError("an adapter can't be on the output layer (lm_head); leave it out")
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and isinstance(model.get_input_embeddings(), LoraLayer):
        raise ValueError("the embedding is the output layer too in this model, and can't have an adapter; leave it out")
