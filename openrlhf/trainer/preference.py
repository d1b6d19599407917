"""What training on preferences has in common: one step, its metrics and an evaluation, for pairs and single answers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from openrlhf.algorithms.metrics import SEQUENCE, MetricSum
from openrlhf.batching import MicroBatch
from openrlhf.trainer.sequences import BLOCK, micro_batches, positions
from openrlhf.trainer.supervised import SupervisedTrainer, reduce_metrics


class PreferenceTrainer(SupervisedTrainer):
    """Minimises the mean of a loss over the rows of each batch.

    A row is one sequence, or several that must be in the same micro-batch. The denominator is the number of rows
    of the optimizer step over all ranks, so ranks, micro-batches and packing don't change the loss.
    """

    # metric of a step -> its name in an evaluation
    eval_names: ClassVar[dict[str, str]]

    @abstractmethod
    def row_losses(self, rows: list[int], batch: MicroBatch, outputs: Any, metrics: MetricSum) -> Tensor:
        """Loss of each row of a micro-batch, ``[rows]``; adds the metrics of these rows.

        Args:
            rows: rows of the training data, or while evaluating, of the evaluation data.
            outputs: what the engine gave for the batch.
        """

    def _groups(self, rows: Sequence[int]) -> list[range]:
        size = self.sequences_per_row
        return [range(size * row, size * (row + 1)) for row in rows]

    def accumulate(self, rows: list[int]) -> MetricSum:
        """See the base class."""
        metrics = MetricSum()
        for name in self.running_means:  # a rank may have nothing but stand-ins
            metrics.add(name, 0.0, 0.0, SEQUENCE)
        groups = self._groups(rows)
        tokens = sum(int(self.data.lengths[list(group)].sum()) for group in groups)

        def loss_of(batch: MicroBatch) -> tuple[Tensor, MetricSum]:
            metrics = MetricSum()
            members = positions(batch, self.sequences_per_row)
            outputs = self.engine(batch)
            if members:
                loss = self.row_losses([rows[i] for i in members], batch, outputs, metrics).sum() / len(rows)
            else:
                loss = outputs[0].sum() * 0  # the log-probs or scores: a gradient, and nothing in it
            loss = self.with_aux_loss(loss, outputs, batch.num_tokens / tokens if members else 0.0, metrics)
            return loss.float(), metrics

        batches = list(micro_batches(self.data, groups, self.engine, self.limits))
        return metrics.merge(self.backoff.accumulate(batches, loss_of))

    def evaluate(self) -> dict[str, float]:
        """Means over all rows of the evaluation data, each row once."""
        metrics = MetricSum()

        def losses_of(batch: MicroBatch) -> Tensor:
            rows = positions(batch, self.sequences_per_row)
            outputs = self.engine(batch)
            return self.row_losses(rows, batch, outputs, metrics) if rows else outputs[0].new_zeros(0)

        groups = self._groups(range(len(self.eval_data)))
        for batch in micro_batches(self.eval_data, groups, self.engine, self.limits, BLOCK):
            self.backoff.forward(batch, losses_of)
        values = reduce_metrics(metrics)
        return {shown: values[name] for name, shown in self.eval_names.items() if name in values}

    @property
    def evaluating(self) -> bool:
        """Whether rows are those of the evaluation data at the moment."""
        return not self.engine.module.training
