"""Tensor parallelism: neighbouring ranks have parts of each layer's matrices, by DeepSpeed's AutoTP.

The ranks of a group get the same micro-batch and compute the same loss. Embeddings, norms and heads are whole on each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn

from openrlhf.config.heads import describe_heads, fitting_sizes, heads_of
from openrlhf.models.loading import unwrap_hf
from openrlhf.models.partition import is_divided, is_partitioned
from openrlhf.models.vision import is_vision_model
from openrlhf.utils.errors import ExplainedError
from openrlhf.workers.distributed import all_reduce_sum


class LayerSplitError(ExplainedError, ValueError):
    """The layers of this model can't be divided among so many ranks."""


def tensor_parallel_config(size: int, model: nn.Module, training: bool) -> dict[str, Any]:
    """DeepSpeed's entries for layers divided among ``size`` ranks; none for 1.

    Raises:
        LayerSplitError: the heads don't divide, or there is no plan for the model that DeepSpeed can follow.
    """
    if size == 1:
        return {}
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    config = unwrap_hf(model.hf_model).config  # type: ignore[arg-type]
    flag = f"--ds_tensor_parallel_size {size}"
    heads = heads_of(config.get_text_config())
    sizes = fitting_sizes(*heads, shared=False)
    if size not in sizes:
        what = describe_heads(*heads, size)
        raise LayerSplitError(f"{flag}: the model ({config.model_type}) {what}; use one of {str(sizes)[1:-1]}")
    if is_vision_model(config):
        raise LayerSplitError(f"{flag}: the vision part of {config.model_type} can't be divided; use 1")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    unknown = sorted({style for style in plan.values() if style.lower() not in SUPPORTED_STYLES})
    if unknown or not plan:
        what = f"has parts ({', '.join(unknown)}) that DeepSpeed can't divide" if unknown else "has none"
        raise LayerSplitError(
            f"{flag}: transformers' plan of how to divide the layers of {config.model_type} {what}; use 1, with "
            "--zero_stage 3 for large models"
        )
    if not training:  # DeepSpeed hangs hooks on gradients; the engine freezes the model afterwards
        model.requires_grad_(True)
    return {"tensor_parallel": {"autotp_size": size, "vocab_parallel_lm_head": False}}


def accept_batches(engine: Any) -> None:
    """Without DeepSpeed's comparison of the first inputs of all ranks, which can't compare a micro-batch."""
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


def divide_frozen(model: nn.Module, config: dict[str, Any]) -> None:
    """Divide the layers of a model without an optimizer, in place."""
    if "tensor_parallel" not in config:
        return
    plain = {**config, "zero_optimization": {"stage": 0}}
    engine, *_ = deepspeed.initialize(model=model, config=plain, dist_init_required=False)
    accept_batches(engine)


def gradient_norm(parameters: Iterable[nn.Parameter], replicas: int) -> float:
    """2-norm of the gradient of the whole model.

    Args:
        parameters: with the gradients of all data, on every rank.
        replicas: ranks that have the same part of a divided layer.
    """
    norms: dict[bool, list[torch.Tensor]] = {False: [torch.zeros((), dtype=torch.float64)], True: []}
    for p in parameters:
        if p.grad is not None:
            norms[is_divided(p)].append(p.grad.detach().double().norm())
    square = float(torch.stack([n.to(norms[False][-1].device) for n in norms[False]]).norm()) ** 2
    if norms[True]:
        square += all_reduce_sum([float(torch.stack(norms[True]).norm()) ** 2])[0] / replicas
    return math.sqrt(square)


def unite_replicas(parameters: Iterable[nn.Parameter]) -> None:
    """Give the weights that each rank of a group has whole the values of the group's first rank, in place.

    The ranks compute the gradients of these weights each for itself, and on a GPU the sums of an embedding's gradient
    come in any order: without this the ranks' copies part, by an element a step at first.
    """
    group, first = groups.get_tensor_model_parallel_group(), groups.get_tensor_model_parallel_src_rank()
    copies: list[Any] = [p for p in parameters if p.requires_grad and not is_divided(p)]
    tensors = [p.data for p in copies if p.data.numel()]  # with ZeRO-3 small weights stay whole beside their part
    tensors += [p.ds_tensor.data for p in copies if is_partitioned(p)]
    for work in [dist.broadcast(tensor, first, group=group, async_op=True) for tensor in tensors]:
        work.wait()
