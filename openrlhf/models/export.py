"""A model's weights under the names of its Hugging Face folder, without gathering more than is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

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
        converter: the model, where its class has other weights than its folder (experts of a layer as one tensor).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[nn.Parameter, ...]
    build: Callable[[], Tensor]
    converter: PreTrainedModel | None = None

    def parts(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of what the folder has for it, which is what vLLM reads."""
        if self.converter is None:
            return [(self.name, self.shape)]
        found = revert_weight_conversion(self.converter, {self.name: torch.empty(self.shape, device="meta")})
        return [(name, tuple(tensor.shape)) for name, tensor in found.items()]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """What :meth:`parts` tells of; while the sources are whole."""
        if self.converter is None:
            return [(self.name, self.build())]
        found = revert_weight_conversion(self.converter, {self.name: self.build()})
        return [(name, tensor.contiguous()) for name, tensor in found.items()]

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
    if is_peft(model):
        weights = list(_merged(base))
    else:
        weights = [_plain(name, parameter) for name, parameter in base.named_parameters()]
    if not getattr(base, "_weight_conversions", None):
        return weights
    return [replace(weight, converter=base) for weight in weights]


def _plain(name: str, parameter: nn.Parameter) -> ExportedWeight:
    shape, dtype = dense_form(parameter)
    return ExportedWeight(name, shape, dtype, (parameter,), lambda: dense(parameter).clone())


def _merged(base: nn.Module) -> Iterator[ExportedWeight]:
    from peft.utils import ModulesToSaveWrapper

    modules = dict(base.named_modules())
    for name, parameter in base.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        owner_name, _, leaf = name.rpartition(".")
        if owner_name.endswith(".base_layer"):
            clean = owner_name.replace(".base_layer", "")
            layer = _adapted(modules[clean], leaf)
            if layer is None:
                yield _plain(f"{clean}.{leaf}", parameter)
            else:
                yield _merged_weight(f"{clean}.{leaf}", layer, parameter)
        elif ".modules_to_save." in name:
            clean = owner_name.split(".modules_to_save.")[0]
            if isinstance(modules[clean], ModulesToSaveWrapper):
                yield _plain(f"{clean}.{leaf}", parameter)
        else:
            yield _plain(name, parameter)


def _adapted(module: nn.Module, leaf: str) -> nn.Module | None:
    """The layer that adapts the weight ``leaf``; tensors of experts have a wrapper each, one around the other."""
    from peft.tuners.lora import LoraLayer

    while isinstance(module, LoraLayer):
        if getattr(module, "parameter_name", "weight") == leaf:
            return module
        module = module.base_layer
    return None


def _add_delta(merged: Tensor, layer: Any, adapter: str) -> None:
    """Add an adapter's ``alpha / r * B A`` to a float32 weight; peft would round it to the adapter's format first."""
    if getattr(layer, "num_experts", 1) > 1:
        lhs, rhs, scaling = layer.get_delta_factors(adapter)
        merged.baddbmm_(lhs.float(), rhs.float(), alpha=scaling)
        return
    if adapter not in layer.lora_A or not isinstance(layer.lora_A[adapter], nn.Linear):  # embeddings and the like
        merged += layer.get_delta_weight(adapter)
        return
    up, down = layer.lora_B[adapter].weight.float(), layer.lora_A[adapter].weight.float()
    factors = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
    merged.addmm_(*factors, alpha=layer.scaling[adapter])


def _merged_weight(name: str, layer: nn.Module, weight: nn.Parameter) -> ExportedWeight:
    adapters = tuple(p for n, p in layer.named_parameters() if "lora_" in n and "base_layer" not in n)
    shape, dtype = dense_form(weight)

    def build() -> Tensor:
        with torch.no_grad():
            merged = dense(weight).to(torch.float32, copy=True)  # rounded once, at the end
            for adapter in layer.active_adapters:  # type: ignore[union-attr]
                _add_delta(merged, layer, adapter)
        return merged.to(dtype)

    return ExportedWeight(name, shape, dtype, (weight, *adapters), build)
