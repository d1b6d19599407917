"""A model's weights under the names of its Hugging Face folder, without gathering more than is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.loading import unwrap_hf
from openrlhf.models.lora import is_peft
from openrlhf.models.quantized import dense, dense_form


@dataclass(frozen=True)
class ExportedWeight:
    """One weight of the exported model.

    Attributes:
        name: its name in a transformers model of the same class.
        shape: full shape, also when the parameter is partitioned.
        sources: parameters that must be whole while ``build`` runs.
        build: makes the full tensor; a fresh copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[nn.Parameter, ...]
    build: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_finite(weight: Tensor) -> bool:
    """Whether no element is NaN or infinite.

    By the extremes, to which NaN belongs: on one CPU thread in a thirtieth of the time of ``torch.isfinite`` for bf16.
    """
    return not weight.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all())


def exported_weights(model: nn.Module) -> list[ExportedWeight]:
    """Every weight of a transformers model once (tied under its first name); LoRA merged in, 4 bits as bf16."""
    base = unwrap_hf(model)
    if not is_peft(model):
        return [_plain(name, parameter) for name, parameter in base.named_parameters()]
    return list(_merged(base))


def _plain(name: str, parameter: nn.Parameter) -> ExportedWeight:
    shape, dtype = dense_form(parameter)
    return ExportedWeight(name, shape, dtype, (parameter,), lambda: dense(parameter).clone())


def _merged(base: nn.Module) -> Iterator[ExportedWeight]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    modules = dict(base.named_modules())
    for name, parameter in base.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        owner_name, _, leaf = name.rpartition(".")
        if owner_name.endswith(".base_layer"):
            clean = owner_name.removesuffix(".base_layer")
            layer = modules[clean]
            if leaf == "weight" and isinstance(layer, LoraLayer):
                yield _merged_weight(f"{clean}.{leaf}", layer, parameter)
                continue
            yield _plain(f"{clean}.{leaf}", parameter)
        elif ".modules_to_save." in name:
            clean = owner_name.split(".modules_to_save.")[0]
            if isinstance(modules[clean], ModulesToSaveWrapper):
                yield _plain(f"{clean}.{leaf}", parameter)
        else:
            yield _plain(name, parameter)


def _add_delta(merged: Tensor, layer: Any, adapter: str) -> None:
    """Add an adapter's ``alpha / r * B A`` to a float32 weight; peft would round it to the adapter's format first."""
    if adapter not in layer.lora_A or not isinstance(layer.lora_A[adapter], nn.Linear):  # embeddings and the like
        merged += layer.get_delta_weight(adapter)
        return
    up, down = layer.lora_B[adapter].weight.float(), layer.lora_A[adapter].weight.float()
    factors = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
    merged.addmm_(*factors, alpha=layer.scaling[adapter])


def _merged_weight(name: str, layer: nn.Module, weight: nn.Parameter) -> ExportedWeight:
    adapters = tuple(p for n, p in layer.named_parameters() if "lora_" in n)
    shape, dtype = dense_form(weight)

    def build() -> Tensor:
        with torch.no_grad():
            merged = dense(weight).to(torch.float32, copy=True)  # rounded once, at the end
            for adapter in layer.active_adapters:  # type: ignore[union-attr]
                _add_delta(merged, layer, adapter)
        return merged.to(dtype)

    return ExportedWeight(name, shape, dtype, (weight, *adapters), build)
