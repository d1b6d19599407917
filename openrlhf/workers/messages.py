"""What the driver sends to model workers. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.algorithms.aggregation import Denominators
from openrlhf.batching.microbatch import MicroBatch

CUTS = "memory/cut_micro_batches"
"""Metric: micro-batches of a step that were cut because they did not fit; see :mod:`openrlhf.workers.backoff`."""


@dataclass(frozen=True)
class StepBatch:
    """One rank's part of one optimizer step.

    Attributes:
        micro_batches: as many on every rank; a rank without work gets stand-ins.
        denominators: counts over all ranks' parts of the step.
        kl_coef: weight of the KL term in the policy loss; 0 when it is in the reward or off.
        progress: steps of the learning rate's schedule that it stands for.
    """

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    kl_coef: float = 0.0
    progress: float = 1.0
