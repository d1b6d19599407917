"""Length penalties on the scalar reward of a sample, before the baseline and the clip of ``advantages``."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(room: Tensor, buffer: float, factor: float) -> Tensor:
    """Soft over-long penalty (DAPO, arXiv:2503.14476), float32 ``[S]``, between ``-factor`` and 0.

    0 while at least ``buffer`` tokens are left, then linear down to ``-factor`` where none is.

    Args:
        room: tokens that were left to each sample until its length limit, ``[S]``.
        buffer: width of the penalised zone (``--overlong_buffer_len``).
        factor: largest penalty (``--overlong_penalty_factor``).
    """
    # `0 -` instead of unary minus: no penalty is 0, not -0
    return 0.0 - (1 - room.float() / buffer).clamp(0, 1) * factor


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Rewards ``[S]``, those of truncated samples multiplied by ``coef`` in [0, 1] or replaced by it if < 0."""
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalised, rewards)


def apply_length_penalties(
    rewards: Tensor,
    room: Tensor,
    truncated: Tensor,
    *,
    overlong_buffer_len: float | None = None,
    overlong_penalty_factor: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
) -> Tensor:
    """Rewards ``[S]`` after the penalties that are switched on; ``stop_properly`` has the last word.

    Args:
        rewards: terminal rewards.
        room: tokens left until the length limit.
        truncated: bool, the response was cut by the length limit.
        overlong_buffer_len, overlong_penalty_factor: see :func:`overlong_penalty`; None switches it off.
        stop_properly_penalty_coef: see :func:`stop_properly`; None switches it off.
    """
    if overlong_buffer_len is not None:
        rewards = rewards + overlong_penalty(room, overlong_buffer_len, overlong_penalty_factor)
    if stop_properly_penalty_coef is not None:
        rewards = stop_properly(rewards, truncated, stop_properly_penalty_coef)
    return rewards
