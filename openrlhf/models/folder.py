"""What the files of a local model folder say before the model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from openrlhf.models.loading import ModelLoadError, check_model_folder


def read_config(path: str) -> dict[str, Any]:
    """The config.json of a local model folder; empty for a hub id."""
    file = Path(path) / "config.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


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
    if names is None or not names.isdisjoint({f"{prefix}.weight", "score.weight"}):  # the latter is found in any case
        return
    others = sorted(n for n in names if n.count(".") == 1 and n.endswith(".weight") and not n.startswith("lm_head"))
    raise ModelLoadError(
        f"{path!r} has no weight {prefix}.weight, so it is no reward model, or its head has another name "
        f"({', '.join(others) or 'it has no weight that looks like one'}); train one with train_rm, or name the head "
        "with --value_head_prefix"
    )
