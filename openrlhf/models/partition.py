"""Parameters that ZeRO-3 or AutoTP has spread over ranks: their real shape, and how to have them whole for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor


def effective_zero_stage(zero_stage: int, keep: bool = False) -> int:
    """The ZeRO stage that runs: one rank has nothing to partition, so stage 3 runs there as stage 2.

    The mathematics and nearly the memory are the same, and the step takes about half the time
    (``benchmarks/training.py``): ZeRO-3 works in Python hooks around every layer.

    Args:
        keep: stage 3 is wanted for something else: to bring weights from the CPU layer by layer, or to read what
            several ranks wrote with it.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return 2 if zero_stage == 3 and alone and not keep else zero_stage


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a parameter before it was partitioned."""
    divided = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    return tuple(divided["logical_shape"] if divided else getattr(parameter, "ds_shape", parameter.shape))


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages this parameter."""
    return hasattr(parameter, "ds_id")


def is_divided(parameter: Tensor) -> bool:
    """Whether tensor parallelism has left each rank a part of this parameter."""
    return getattr(parameter, "ds_is_replaced_module", False)


@contextlib.contextmanager
def whole(parameters: Iterable[Tensor], write: bool = False) -> Iterator[None]:
    """A context in which the parameters are whole on every rank (collective where they are partitioned).

    Args:
        write: what rank 0 changes inside is spread to all ranks at the end; not of divided parameters.
    """
    distinct = list({id(p): p for p in parameters}.values())
    with _without_zero3([p for p in distinct if is_partitioned(p)], write):
        parts: list[tuple[Any, Tensor]] = [(p, p.data) for p in distinct if is_divided(p)]
        for parameter, _ in parts:
            parameter.gather_params([parameter])
        try:
            yield
        finally:
            for parameter, part in parts:
                parameter.data = part


def _without_zero3(spread: list[Tensor], write: bool) -> Any:
    if not spread:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(spread, modifier_rank=0 if write else None)
