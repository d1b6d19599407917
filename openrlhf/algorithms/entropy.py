"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from openrlhf.algorithms.packed import at_least_float32


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of ``softmax(logits / temperature)``, at least float32.

    The temperature is the rollout's: entropy describes the policy that is sampled and trained.

    Args:
        logits: ``[..., V]``, raw. Entries of minus infinity (tokens that can't be sampled) contribute 0.
        temperature: > 0.

    Returns:
        ``[...]``.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    scaled = at_least_float32(logits) / temperature
    logprobs = scaled.log_softmax(-1)
    # 0 * -inf is NaN; the limit of p log p is 0
    finite = torch.where(logprobs == -torch.inf, torch.zeros_like(logprobs), logprobs)
    return -(logprobs.exp() * finite).sum(-1)
