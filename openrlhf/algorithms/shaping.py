"""Length penalties on the scalar reward of a sample, before the baseline and the clip of ``advantages``."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: float, factor: float) -> Tensor:
    """Soft over-long penalty (DAPO, arXiv:2503.14476), float32 ``[S]``, between ``-factor`` and 0.

    0 up to ``max_length - buffer`` tokens, then linear down to ``-factor`` at ``max_length`` and beyond.

    Args:
        lengths: response tokens of each sample, ``[S]``.
        max_length: limit of the response (``--max_new_tokens``).
        buffer: width of the penalised zone (``--overlong_buffer_len``).
        factor: largest penalty (``--overlong_penalty_factor``).

    Raises:
        ValueError: the buffer is not in (0, max_length].
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"--overlong_buffer_len must be > 0 and at most the response limit {max_length}, got {buffer}")
    exceeded = lengths.float() - (max_length - buffer)
    # `0 -` instead of unary minus: no penalty is 0, not -0
    return 0.0 - (exceeded / buffer).clamp(0, 1) * factor


def stop_properly(rewards: Tensor, truncated: Tensor, coef: float) -> Tensor:
    """Rewards ``[S]``, those of truncated samples multiplied by ``coef`` in [0, 1] or replaced by it if < 0.

    Raises:
        ValueError: ``coef`` is above 1.
    """
    if not coef <= 1:
        raise ValueError(f"--stop_properly_penalty_coef must be at most 1, got {coef}")
    penalised = rewards * coef if coef >= 0 else torch.full_like(rewards, coef)
    return torch.where(truncated, penalised, rewards)


def apply_length_penalties(
    rewards: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    *,
    max_length: int | None = None,
    overlong_buffer_len: float | None = None,
    overlong_penalty_factor: float = 1.0,
    stop_properly_penalty_coef: float | None = None,
) -> Tensor:
    """Rewards ``[S]`` after the penalties that are switched on; ``stop_properly`` has the last word.

    Args:
        rewards: terminal rewards.
        lengths: response tokens.
        truncated: bool, the response was cut by the length limit.
        max_length: response limit; needed for the over-long penalty.
        overlong_buffer_len, overlong_penalty_factor: see :func:`overlong_penalty`; None switches it off.
        stop_properly_penalty_coef: see :func:`stop_properly`; None switches it off.
    """
    if overlong_buffer_len is not None:
        if max_length is None:
            raise ValueError("--overlong_buffer_len needs a response limit (--max_new_tokens or --max_len)")
        rewards = rewards + overlong_penalty(lengths, max_length, overlong_buffer_len, overlong_penalty_factor)
    if stop_properly_penalty_coef is not None:
        rewards = stop_properly(rewards, truncated, stop_properly_penalty_coef)
    return rewards
