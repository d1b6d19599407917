"""Folders that the small commands make: complete or not at all, and never over something of another origin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.config import ConvertConfig, LoraCombinerConfig
from openrlhf.models.export import is_finite
from openrlhf.models.loading import torch_dtype, write_hf_folder
from openrlhf.tools.errors import ToolError
from openrlhf.tools.loading import LoadSettings, load_for_inference
from openrlhf.tools.verify import answers, require_same
from openrlhf.utils.files import publish_folder, temporary_folder

MARKER = "made_by.json"


def check_output(output: str, command: str, inputs: Mapping[str, str | None]) -> Path:
    """The output folder, if it may be written.

    Args:
        inputs: folders that are read, by flag.

    Raises:
        ToolError: the folder has content of another origin, or is one of the inputs.
    """
    path = Path(output)
    for flag, source in inputs.items():
        if source and Path(source).resolve() == path.resolve():
            raise ToolError(f"--output_path {output} is --{flag}; choose another folder")
    if path.exists() and not path.is_dir():
        raise ToolError(f"--output_path {output} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()) and _maker(path) != command:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:10])
        raise ToolError(
            f"--output_path {output} is not empty and was not made by {command} (it holds: {found}); choose another "
            "folder, or remove it first"
        )
    return path


def write_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    cfg: LoraCombinerConfig | ConvertConfig,
    before: list[Tensor],
    made_by: Mapping[str, Any],
    updates: Mapping[str, Any] | None = None,
) -> str:
    """Write a model with its tokenizer in the format of ``--param_dtype``; the folder appears when all is well.

    Args:
        model: it has no weights afterwards.
        before: with ``--verify`` what the model has to say (see :func:`answers`).
        made_by: what the folder notes about how it was made.
        updates: entries to set in its config.json.

    Returns:
        The end of a sentence, which says how far the answers of what was written are from ``before``.

    Raises:
        ToolError: a weight is not finite, or the answers differ.
    """
    dtype = torch_dtype(cfg.param_dtype)
    model.to(dtype)
    state = {name: tensor.detach() for name, tensor in _named_state(model)}
    bad = next((name for name, tensor in state.items() if not is_finite(tensor)), None)
    if bad is not None:
        raise ToolError(
            f"the weight {bad} is not finite in {cfg.param_dtype}; use --param_dtype bf16 or fp32, or check its source"
        )
    told = ""
    with temporary_folder(output) as scratch:
        write_hf_folder(model, state, scratch, tokenizer, {**(updates or {}), "dtype": dtype})
        (scratch / MARKER).write_text(json.dumps(made_by, indent=1) + "\n", encoding="utf-8")
        if cfg.verify:
            del state
            model.to("meta")
            again = load_for_inference(str(scratch), LoadSettings(param_dtype=cfg.param_dtype), is_rm=cfg.is_rm)
            told = "; " + require_same(before, answers(again, tokenizer, cfg.is_rm), cfg.is_rm, cfg.param_dtype)
        publish_folder(scratch, output)
    return told


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights (a tied one once) and buffers that a model folder has."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name not in parameters)


def _maker(folder: Path) -> str | None:
    file = folder / MARKER
    return json.loads(file.read_text(encoding="utf-8")).get("command") if file.is_file() else None
