"""Models for inference in one process: what loading needs beside the flags that a small command has."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from openrlhf.config.options_model import DeepSpeedOptions, LoadOptions, ModelOptions
from openrlhf.models.loading import (
    DTYPES,
    ModelLoadError,
    check_model_folder,
    load_causal_lm,
    load_sequence_regression,
)

DEFAULT_HEAD = "score"


@dataclass(kw_only=True)
class LoadSettings(ModelOptions, DeepSpeedOptions):
    """The flags that decide how a model is loaded, and how an engine runs it; those of training are off."""

    param_dtype: str = "fp32"
    zero_stage: int = 0
    seed: int = 0

    @classmethod
    def of(cls, cfg: LoadOptions) -> LoadSettings:
        """As the flags of a command say that has those of loading only."""
        return cls(**{field.name: getattr(cfg, field.name) for field in fields(LoadOptions)})


def load_for_inference(path: str, settings: LoadSettings, *, is_rm: bool, head_prefix: str = DEFAULT_HEAD) -> nn.Module:
    """A causal language model, or with ``is_rm`` a transformer with a scalar head, without gradients.

    Raises:
        ModelLoadError: the model can't be read.
    """
    if is_rm:
        return load_sequence_regression(path, settings, head_prefix=head_prefix, trainable=False)
    return load_causal_lm(path, settings, trainable=False)


def use_modelscope() -> None:
    """Make transformers download what is not local from ModelScope (``--use_ms``)."""
    from modelscope.utils.hf_util import patch_hub

    patch_hub()


def read_config(path: str) -> dict[str, Any]:
    """The config.json of a local model folder; empty for a hub id."""
    file = Path(path) / "config.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def stored_dtype(path: str, default: str) -> str:
    """The number format (as a ``--param_dtype``) that a local model folder says its weights have."""
    config = read_config(path)
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    by_torch_name = {str(dtype).removeprefix("torch."): flag for flag, dtype in DTYPES.items()}
    return by_torch_name.get(name, default)


def weight_names(path: str) -> set[str] | None:
    """Names of the weights in a local model folder; None for a hub id."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    for file in folder.glob("pytorch_model*.bin"):
        names |= set(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return names


def require_head(path: str, head_prefix: str) -> None:
    """Refuse a local model folder without a trained scalar head: its scores would be random.

    Raises:
        ModelLoadError: names the weight that is missing, and heads that are there; or the folder is no model.
    """
    check_model_folder(path)
    names = weight_names(path)
    prefix = read_config(path).get("value_head_prefix") or head_prefix
    if names is None or f"{prefix}.weight" in names:
        return
    others = sorted(n for n in names if n.count(".") == 1 and n.endswith(".weight") and not n.startswith("lm_head"))
    raise ModelLoadError(
        f"{path!r} has no weight {prefix}.weight, so it is no reward model, or its head has another name "
        f"({', '.join(others) or 'it has no weight that looks like one'}); train one with train_rm, or name the head "
        "with --value_head_prefix"
    )
