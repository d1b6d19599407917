"""DeepSpeed's offloading of a training engine's states, made to work for every optimizer and for frozen weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum


def offload_engine(engine: Any, stage: int) -> None:
    """Move optimizer states, master weights, gradients and trained weights of a DeepSpeed engine to pinned memory.

    Under ZeRO-3 the weights of a model with frozen ones stay: DeepSpeed's buffer of them has none of the frozen ones,
    but would give them places in it.

    Args:
        stage: the ZeRO stage that runs.
    """
    kinds = None
    if stage == 3 and not all(p.requires_grad for p in engine.module.parameters()):
        kinds = [kind for kind in OffloadStateTypeEnum if kind != OffloadStateTypeEnum.lp_params]
    with _any_optimizer(engine.optimizer):
        engine.offload_states(include=kinds, pin_memory=True, non_blocking=True)
    if stage == 3:
        # The copies of --zpg, which the next pass makes anew, as after a step; those of frozen weights stay.
        engine.optimizer.invalidate_secondary_tensor()


@contextlib.contextmanager
def _any_optimizer(zero: Any) -> Iterator[None]:
    """ZeRO-3 offloads only FusedAdam, which it tests for by its class; the states of ours have the same names."""
    from deepspeed.ops.adam import fused_adam

    original = fused_adam.FusedAdam
    fused_adam.FusedAdam = type(getattr(zero, "optimizer", zero))
    try:
        yield
    finally:
        fused_adam.FusedAdam = original


def drop_gradients(optimizer: Any) -> None:
    """Empty a ZeRO-1 or ZeRO-2 optimizer as after an overflow, and take back the marks of a pass under way."""
    optimizer.zero_grad(set_to_none=True)
    for index in optimizer.averaged_gradients.keys() | optimizer.all_grad_tensors.keys():
        optimizer.averaged_gradients[index] = optimizer.all_grad_tensors[index] = None
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_preflattened_grad_buffers()
    optimizer.micro_step_id = -1
    optimizer.ready_for_gradients = False
    optimizer.clear_backward_seen_flag()
    optimizer._backward_active_depth = optimizer._remaining_grad_acc_hooks = 0
