"""Packing of sequences and balancing of micro-batches: pure functions of lengths and arrays."""

from openrlhf.batching.microbatch import MicroBatch, pack, unpack
from openrlhf.batching.plan import BatchPlan, plan_micro_batches, split_optimizer_steps

__all__ = ["BatchPlan", "MicroBatch", "pack", "plan_micro_batches", "split_optimizer_steps", "unpack"]
