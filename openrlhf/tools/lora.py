"""Merge a LoRA adapter into its base model (``lora_combiner``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from openrlhf.config import LoraCombinerConfig
from openrlhf.models.folder import check_model_folder, read_config
from openrlhf.models.loading import load_sequence_regression, load_tokenizer, unwrap_hf
from openrlhf.tools.errors import ToolError
from openrlhf.tools.loading import DEFAULT_HEAD, LoadSettings, load_for_inference, stored_dtype
from openrlhf.tools.output import check_output, write_model
from openrlhf.tools.verify import answers
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

COMMAND = "lora_combiner"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What training a reward model notes in the config.json beside its adapter.
_KEPT_CONFIG = ("value_head_prefix", "mean", "std", "normalize_reward")


def run(cfg: LoraCombinerConfig) -> str:
    """Merge, check and write; a sentence about what was done.

    Each layer is merged in float32 and rounded once, to the format of the result. The files appear when all is well.

    Raises:
        ToolError: the adapter doesn't fit, changes nothing, or the result differs from base + adapter.
        ModelLoadError: the base model can't be read.
    """
    base_path, lora_path, output_path = cfg.model_path, cfg.lora_path, cfg.output_path
    assert base_path and lora_path and output_path
    output = check_output(output_path, COMMAND, {"model_path": base_path, "lora_path": lora_path})
    adapter = _read_adapter(lora_path, cfg.is_rm)
    check_model_folder(base_path)
    tokenizer = _tokenizer(base_path, lora_path)
    settings = LoadSettings(param_dtype=stored_dtype(base_path, cfg.param_dtype))
    if _trained_in_4bit(lora_path):
        settings = LoadSettings(param_dtype="bf16", load_in_4bit=True)
    model = _load_together(base_path, lora_path, adapter, settings, cfg.is_rm)
    before = answers(model, tokenizer, cfg.is_rm) if cfg.verify else []
    merged, count = _merge(model, base_path)
    noted = read_config(lora_path)
    updates = {key: noted[key] for key in _KEPT_CONFIG if noted.get(key) is not None}
    made_by = {"command": COMMAND, "model_path": base_path, "lora_path": lora_path, "param_dtype": cfg.param_dtype}
    verified = write_model(merged, tokenizer, output, cfg, before, made_by, updates)
    return f"merged {count} layers of {lora_path} into {output_path}{verified}"


def _read_adapter(lora_path: str, is_rm: bool) -> dict[str, Any]:
    """adapter_config.json.

    Raises:
        ToolError: the folder is no adapter, or one of another kind of model.
    """
    folder = Path(lora_path)
    files = ", ".join(sorted(p.name for p in folder.iterdir())[:20]) if folder.is_dir() else ""
    if not (folder / "adapter_config.json").is_file():
        raise ToolError(
            f"--lora_path {lora_path} has no adapter_config.json (it holds: {files or 'nothing'}); give the "
            "folder that training with --lora_rank wrote"
        )
    if not any((folder / name).is_file() for name in _ADAPTER_WEIGHTS):
        raise ToolError(f"--lora_path {lora_path} has no {' or '.join(_ADAPTER_WEIGHTS)} (it holds: {files})")
    adapter = dict(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))
    task = adapter.get("task_type")
    if task == "SEQ_CLS" and not is_rm:
        raise ToolError(f"the adapter {lora_path} belongs to a reward model (task_type SEQ_CLS); add --is_rm")
    if task == "CAUSAL_LM" and is_rm:
        raise ToolError(
            f"the adapter {lora_path} belongs to a causal language model (task_type CAUSAL_LM); leave --is_rm out"
        )
    return adapter


def _trained_in_4bit(lora_path: str) -> bool:
    """Whether training noted beside the adapter that its base model was loaded with ``--load_in_4bit``."""
    return bool((read_config(lora_path).get("quantization_config") or {}).get("load_in_4bit"))


def _tokenizer(base_path: str, lora_path: str) -> PreTrainedTokenizerBase:
    """That of the adapter's folder, which has the chat template of the training, else that of the base model."""
    own = (Path(lora_path) / "tokenizer_config.json").is_file()
    return load_tokenizer(lora_path if own else base_path)


def _load_together(
    base_path: str, lora_path: str, adapter: dict[str, Any], settings: LoadSettings, is_rm: bool
) -> nn.Module:
    from peft import PeftModel

    named = adapter.get("base_model_name_or_path")
    if named and Path(str(named)).name != Path(base_path).name:
        logger.warning("the adapter was trained on %s and is merged into %s", named, base_path)
    prefix = read_config(lora_path).get("value_head_prefix") or DEFAULT_HEAD
    if is_rm and DEFAULT_HEAD in (adapter.get("modules_to_save") or ()):  # so the base model may have none
        base = load_sequence_regression(base_path, settings, head_prefix=prefix).requires_grad_(False)
    else:
        base = load_for_inference(base_path, settings, is_rm=is_rm, head_prefix=prefix)
    if settings.load_in_4bit:
        logger.warning("the adapter was trained on 4-bit weights: it is merged into what these stand for, in bf16")
        base = base.dequantize().requires_grad_(False)  # type: ignore[operator]
    try:
        model = PeftModel.from_pretrained(base, lora_path)
        result = model.load_adapter(lora_path, "default")
    except (ValueError, RuntimeError, KeyError, TypeError, OSError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ToolError(f"the adapter {lora_path} does not fit the base model {base_path}: {first}") from error
    lost = [*result.unexpected_keys, *result.missing_keys]
    if lost:
        raise ToolError(
            f"the adapter {lora_path} does not fit the base model {base_path}: {len(result.unexpected_keys)} of its "
            f"weights have no place and {len(result.missing_keys)} places get no weight, for example {lost[0]}"
        )
    return model.eval()


def _merge(model: nn.Module, base_path: str) -> tuple[nn.Module, int]:
    """The base model with the adapter in its weights, and the number of layers that changed.

    Raises:
        ToolError: no weight changed, or one is no longer finite.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = unwrap_hf(model)
    _untie(base)
    changed = 0
    for name, layer in base.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))  # or a tensor of experts
        # Float32 from here on: rounded only once, to the format of the result.
        before = weight.data.float()
        weight.data = before
        try:
            layer.merge(safe_merge=True)
        except (ValueError, RuntimeError) as error:
            raise ToolError(f"the adapter can't be merged into {name} of {base_path}: {error}") from error
        changed += not torch.equal(weight.data, before)
    changed += _changed_copies(base)
    if changed == 0:
        raise ToolError(
            "the adapter changes no weight (all its B matrices are 0: was it trained?); nothing was written"
        )
    return model.unload(), changed  # type: ignore[operator]


def _changed_copies(base: nn.Module) -> int:
    """Modules that were trained whole and differ from those of the base model."""
    from peft.utils import ModulesToSaveWrapper

    wrappers = [m for m in base.modules() if isinstance(m, ModulesToSaveWrapper)]
    return sum(_differ(w.original_module, w.modules_to_save[w.active_adapters[0]]) for w in wrappers)


def _differ(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return any(not torch.equal(x.float(), y.float()) for x, y in pairs)


def _untie(base: PreTrainedModel) -> None:
    """Give an adapted layer a weight of its own where it shares it with another layer (embedding and output)."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    if not tied or not any(isinstance(end, (BaseTunerLayer, ModulesToSaveWrapper)) for end in ends):
        return
    for end in ends:
        if isinstance(end, BaseTunerLayer):
            inner = end.get_base_layer()
            inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
    for config in (base.config, base.config.get_text_config()):
        config.tie_word_embeddings = False
