"""Value loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.algorithms.packed import at_least_float32, zero_masked


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error for each token (Schulman et al. 2016; PPO's reference implementation).

    ``0.5 * max((v - R)^2, (old + clamp(v - old, -clip, clip) - R)^2)``. Index ``t`` is the value of the state
    *before* token ``t``, so the critic's mask is the action mask itself.

    Args:
        values: current critic, ``[N]``, requires grad.
        old_values: critic at rollout time, ``[N]``.
        returns: targets, ``[N]``.
        mask: bool ``[N]``; other positions have no influence.
        clip: radius, or None for no clipping.

    Returns:
        ``(per_token[N], metrics)``; the metrics are per token and detached: ``values`` and
        ``value_clip_ratio`` (1 where the new value left the clip range).
    """
    new, old, target = (zero_masked(at_least_float32(x), mask) for x in (values, old_values.detach(), returns.detach()))
    loss = (new - target) ** 2
    clipped = torch.zeros_like(loss)
    if clip is not None:
        bounded = old + (new - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - target) ** 2)
        clipped = ((new - old).abs() > clip).to(loss.dtype)
    return 0.5 * loss, {"values": new.detach(), "value_clip_ratio": clipped.detach()}
