"""Parameters that ZeRO-3 has spread over ranks: their real shape, and how to have them whole for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of a parameter before it was partitioned."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 manages this parameter."""
    return hasattr(parameter, "ds_id")


def whole(parameters: Iterable[Tensor], write: bool = False) -> Any:
    """A context in which the parameters are whole on every rank (collective where they are partitioned).

    Args:
        write: what rank 0 changes inside is spread to all ranks at the end.
    """
    spread = list({id(p): p for p in parameters if is_partitioned(p)}.values())
    if not spread:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(spread, modifier_rank=0 if write else None)
