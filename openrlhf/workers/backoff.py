"""A micro-batch that does not fit into GPU memory is cut in two and tried again; the result stays the same.

The loss of a micro-batch is a sum over its sequences, divided by a denominator of the whole optimizer step, so two
halves give the gradient of the whole. A pass that failed half-way has left gradients behind; they are dropped, and the
step begins anew. Ranks that exchange something during a pass would wait for the one that failed: there the run ends,
with what to turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.metrics import STEP, MetricSum
from openrlhf.batching import MicroBatch
from openrlhf.platform import empty_cache, memory_stats
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.messages import CUTS

logger = get_logger(__name__)

Loss = Callable[[MicroBatch], tuple[Tensor, MetricSum]]


class OutOfMemoryError(ExplainedError, RuntimeError):
    """A micro-batch does not fit into GPU memory and can't be cut; says what to turn."""


@dataclass(frozen=True)
class Advice:
    """What to turn where memory does not suffice: in passes with gradients, and in those without."""

    training: str
    forward: str


_OTHER = "more GPUs with --zero_stage 3, --adam_offload, or a lower --max_len"
_PPO = "a lower --micro_{0}_batch_size (with --use_dynamic_batch --{0}_max_tokens_per_gpu), "
_ROWS = "a lower --micro_train_batch_size, "
_RECOMPUTE = "--gradient_checkpointing, "
PPO_ADVICE = Advice(_PPO.format("train") + _RECOMPUTE + _OTHER, _PPO.format("rollout") + _OTHER)
SUPERVISED_ADVICE = Advice(_ROWS + _RECOMPUTE + _OTHER, _ROWS + _OTHER)


def cut(batch: MicroBatch, group: int = 1) -> list[MicroBatch]:
    """A micro-batch as two of about half the tokens each; the same one where it has a single group of sequences.

    Args:
        group: neighbouring sequences that stay together (2: the answers of a pair).
    """
    if batch.num_sequences < 2 * group:
        return [batch]
    ends = batch.cu_seqlens[group:-group:group].long()
    first = group * (int((ends - batch.num_tokens / 2).abs().argmin()) + 1)
    return [_part(batch, 0, first), _part(batch, first, batch.num_sequences)]


def _part(batch: MicroBatch, first: int, last: int) -> MicroBatch:
    """Sequences ``first`` to ``last - 1``."""
    start, end = int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last])
    return MicroBatch(
        batch.input_ids[start:end],
        batch.cu_seqlens[first : last + 1] - start,
        {name: column[start:end] for name, column in batch.columns.items()},
        batch.sequence_index[first:last],
        tuple((at - start, count, content) for at, count, content in batch.images if start <= at < end),
    )


class MemoryBackoff:
    """Runs micro-batches through an engine, smaller ones where memory does not suffice.

    Once a micro-batch did not fit, later ones of its size are cut before they are tried.

    Args:
        engine: of one rank, or in passes that exchange nothing; see :meth:`TrainEngine.passes_alone`.
        group: neighbouring sequences that stay together.
        advice: part of what a user is told.
    """

    def __init__(self, engine: TrainEngine, group: int = 1, advice: Advice = PPO_ADVICE) -> None:
        self.engine = engine
        self._group = group
        self._advice = advice
        self._too_many: int | None = None
        """Tokens of the smallest micro-batch that did not fit."""

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss_of: Loss) -> MetricSum:
        """Forward and backward pass of each micro-batch of an optimizer step.

        Args:
            micro_batches: of the step, on any device.
            loss_of: loss, divided by the denominator of the whole step, and metrics of a micro-batch on the device.

        Returns:
            The metrics of all, with :data:`openrlhf.workers.messages.CUTS`.

        Raises:
            OutOfMemoryError: see the class.
        """
        batches, cuts = self._small_enough(micro_batches, training=True)
        while True:
            metrics, failed = self._attempt(batches, loss_of)
            if failed is None:
                break
            batches[failed : failed + 1] = self._halves(batches[failed], training=True)
            self.engine.discard_gradients()
            cuts += 1
        metrics.add(CUTS, float(cuts), 1.0, STEP)
        return metrics

    def _attempt(self, batches: Sequence[MicroBatch], loss_of: Loss) -> tuple[MetricSum, int | None]:
        """Metrics, and the place of the micro-batch that did not fit. What it had allocated is free on return."""
        metrics = MetricSum()
        for index, batch in enumerate(batches):
            try:
                loss, part = loss_of(self.engine.place(batch))
                self.engine.backward(loss, last=index == len(batches) - 1)
            except torch.OutOfMemoryError:
                return metrics, index
            metrics = metrics.merge(part)
        return metrics, None

    @torch.no_grad()
    def forward(self, batch: MicroBatch, run: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Output of a pass without gradients: per token or per sequence, in the order of the micro-batch.

        Raises:
            OutOfMemoryError: see the class.
        """
        batches, _ = self._small_enough([batch], training=False)
        outputs: list[Tensor] = []
        while batches:
            output = self._try(batches[0], run)
            if output is None:
                batches[:1] = self._halves(batches[0], training=False)
            else:
                outputs.append(output)
                batches.pop(0)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _try(self, batch: MicroBatch, run: Callable[[MicroBatch], Tensor]) -> Tensor | None:
        try:
            return run(self.engine.place(batch))
        except torch.OutOfMemoryError:
            return None

    def _small_enough(self, batches: Sequence[MicroBatch], training: bool) -> tuple[list[MicroBatch], int]:
        """Micro-batches below the size that once did not fit, and how many were cut for it.

        Where ranks wait for one another none is cut: each must have as many as the others.
        """
        if not self.engine.passes_alone(training):
            return list(batches), 0
        result: list[MicroBatch] = []
        waiting, cuts = list(batches), 0
        while waiting:
            batch = waiting.pop(0)
            if self._too_many is not None and batch.num_tokens >= self._too_many and self._divides(batch):
                waiting[:0] = cut(batch, self._group)
                cuts += 1
            else:
                result.append(batch)
        return result, cuts

    def _divides(self, batch: MicroBatch) -> bool:
        return batch.num_sequences >= 2 * self._group

    def _halves(self, batch: MicroBatch, training: bool) -> list[MicroBatch]:
        empty_cache()
        size = f"{batch.num_tokens} tokens in {batch.num_sequences} sequences"
        memory = f"{memory_stats()} after the attempt"
        advice = f"to avoid it: {self._advice.training if training else self._advice.forward}"
        if not self.engine.passes_alone(training) or not self._divides(batch):
            raise OutOfMemoryError(f"a micro-batch of {size} does not fit into GPU memory ({memory}); {advice}")
        self._too_many = min(batch.num_tokens, self._too_many or batch.num_tokens)
        logger.warning(
            "a micro-batch of %s does not fit into GPU memory (%s): it is cut in two, and so will others be; %s",
            *(size, memory, advice),
        )
        return cut(batch, self._group)
