"""What the files of a local model folder say before the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from openrlhf.models.checks import ModelLoadError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def check_model_folder(path: str) -> None:
    """Fail early, and by name, when a local model folder is incomplete. Hub ids pass.

    Raises:
        ModelLoadError: the path does not exist, or lacks its configuration or (some of) its weights, or is an adapter.
    """
    folder = Path(path)
    if not folder.exists():
        if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
            raise ModelLoadError(f"model folder {path!r} does not exist")
        return
    if not folder.is_dir():
        raise ModelLoadError(f"{path!r} is a file; give the folder that holds config.json and the weights")
    files = ", ".join(sorted(p.name for p in folder.iterdir())[:20]) or "nothing"
    weights = [file for pattern in WEIGHT_FILES for file in folder.glob(pattern) if "adapter_" not in file.name]
    if (folder / "adapter_config.json").is_file() and not weights:
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        raise ModelLoadError(
            f"{path!r} holds a LoRA adapter, not a model; merge it into its base model first: openrlhf lora_combiner "
            f"--model_path {adapter.get('base_model_name_or_path') or 'BASE'} --lora_path {path} --output_path "
            f"{path.rstrip('/')}_merged{' --is_rm' if adapter.get('task_type') == 'SEQ_CLS' else ''}"
        )
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"model folder {path!r} has no config.json (it holds: {files})")
    for index in folder.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, OSError) as error:
            raise ModelLoadError(f"{index} is not a readable weight index: {error}") from error
        missing = sorted(s for s in shards if not (folder / s).is_file())
        if missing:
            raise ModelLoadError(f"model folder {path!r} lacks weight files that {index.name} names: {missing[:10]}")
    if not weights:
        raise ModelLoadError(f"model folder {path!r} has no weights (model.safetensors); it holds: {files}")


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
    raise no_head(path, prefix, names)


def no_head(path: str, prefix: str, names: Iterable[str] = ()) -> ModelLoadError:
    """The refusal of a model that has no scalar head; of the weights' ``names`` it tells those that may be one."""
    heads = sorted(n for n in names if n.count(".") == 1 and n.endswith(".weight") and not n.startswith("lm_head"))
    return ModelLoadError(
        f"{path!r} has no weight {prefix}.weight, so it is no reward model, or its head has another name "
        f"({', '.join(heads) or 'it has no weight that looks like one'}); train one with train_rm, or name the head "
        "with --value_head_prefix"
    )
