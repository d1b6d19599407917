"""Elementwise parts of a transformer as single GPU kernels: norm, gated activation, rotary embedding.

transformers writes each as several operations, which read and write all activations several times; together they
take longer than attention. On a CPU nothing is changed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.models.partition import full_shape, whole

F_ = TypeVar("F_", bound=Callable[..., Any])
# Relative difference allowed between a module and its fused form, in float32.
_TOLERANCE = 1e-4


@functools.cache
def _compiler() -> bool:
    return os.environ.get("OPENRLHF_FUSE", "1") != "0" and importlib.util.find_spec("triton") is not None


def can_fuse(device: torch.device) -> bool:
    """Whether torch.compile makes kernels for this device: with Triton, which CUDA builds of PyTorch bring along.

    ``OPENRLHF_FUSE=0`` in the environment switches it off.
    """
    return device.type == "cuda" and _compiler()


@functools.cache
def fuse(function: F_) -> F_:
    """The function as one kernel, compiled at first use.

    The number of rows becomes variable when a second one is met; widths stay fixed, which makes better kernels.
    """
    return torch.compile(function)  # type: ignore[return-value]


def fuse_elementwise(model: PreTrainedModel) -> int:
    """Replace what is recognised in a model on a GPU by fused forms, where they give the same numbers.

    Each kind of module is tried out on random input first; one that computes something else is left as it is.

    Returns:
        Number of modules changed.
    """
    changed = 0
    verdicts: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        form = _norm_forward if _is_rms_norm(module) else _mlp_forward if _is_gated_mlp(module) else None
        if form is None:
            continue
        if kind not in verdicts:
            verdicts[kind] = _same(module, form)
        if verdicts[kind]:
            module.forward = types.MethodType(form, module)
            changed += 1
    return changed + _fuse_rotary(model)


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and _epsilon(module) is not None
    )


def _epsilon(module: nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(value) if isinstance(value, (int, float)) else None


def _is_gated_mlp(module: nn.Module) -> bool:
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(hasattr(module, part) for part in parts) and isinstance(module.gate_proj, nn.Module)


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, _epsilon(self))


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj((fuse(_swiglu) if can_fuse(gate.device) else _swiglu)(gate, up))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _fuse_rotary(model: PreTrainedModel) -> int:
    namespace = sys.modules[type(model).__module__]
    original = getattr(namespace, "apply_rotary_pos_emb", None)
    if original is None or getattr(original, "openrlhf_fused", False):
        return 0
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8))
    q, k, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        same = all(torch.allclose(a, b) for a, b in zip(original(q, k, cos, sin), _rotary(q, k, cos, sin), strict=True))
    except (TypeError, ValueError, RuntimeError):  # another signature or layout: not what is fused here
        same = False
    if not same:
        return 0

    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if not can_fuse(q.device) or cos.shape[-1] != q.shape[-1]:  # the original may turn a part of each head only
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return fuse(_rotary)(q, k, cos, sin, unsqueeze_dim)

    apply_rotary_pos_emb.openrlhf_fused = True  # type: ignore[attr-defined]
    namespace.apply_rotary_pos_emb = apply_rotary_pos_emb  # type: ignore[attr-defined]
    return 1


def _same(module: nn.Module, form: Callable[..., Tensor]) -> bool:
    """Whether the fused form of a module gives what the module gives."""
    parameters = list(module.parameters())
    width = full_shape(parameters[0])[-1] if _is_rms_norm(module) else getattr(module.gate_proj, "in_features", None)
    if width is None or any(p.dtype not in (torch.float32, torch.bfloat16, torch.float16) for p in parameters):
        return False
    with torch.no_grad(), whole(parameters):
        parameter = parameters[0]
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(parameter)
        expected, got = module(x).float(), types.MethodType(form, module)(x).float()
    bound = _TOLERANCE if parameter.dtype == torch.float32 else 2e-2
    return bool((expected - got).norm() <= bound * expected.norm())
