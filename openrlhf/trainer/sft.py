"""Supervised fine-tuning, and continued pre-training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from openrlhf.algorithms.losses import cross_entropy_sum
from openrlhf.algorithms.metrics import TOKEN, MetricSum
from openrlhf.batching import MicroBatch, pack
from openrlhf.config import SFTConfig
from openrlhf.datasets.sft import LazySFTDataset, Row, SFTDataset, build_sft_dataset, open_sft_dataset
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.trainer.sequences import BLOCK, own_plan
from openrlhf.trainer.supervised import (
    SupervisedTrainer,
    open_tokenizer,
    read_data,
    reduce_metrics,
    total_steps,
    train_engine,
)
from openrlhf.workers.distributed import World


class SFTTrainer(SupervisedTrainer):
    """Minimises the mean negative log-likelihood of the supervised tokens of each batch."""

    headline: ClassVar[tuple[str, ...]] = ("gpt_loss", "lr", "grad_norm")
    running_means: ClassVar[dict[str, str]] = {"gpt_loss": "loss_mean"}

    data: SFTDataset | LazySFTDataset
    eval_data: SFTDataset

    def take_rows(self) -> list[int]:
        """The rows of the next step."""
        return self.data.take(self.order, self.cfg.train_batch_size)

    def _micro_batches(self, rows: list[Row]) -> Iterator[MicroBatch]:
        """This rank's share of some rows, on its device; as many on every rank."""
        ids, masks = [ids for ids, _ in rows], [mask for _, mask in rows]
        for members in own_plan([len(own) for own in ids], self.engine, self.limits):
            yield self.engine.place(pack(ids, {"mask": masks}, members))

    def accumulate(self, rows: list[int]) -> MetricSum:
        """See the base class; the loss does not depend on ranks, micro-batches or packing."""
        parts = self.data.fetch(rows)
        targets = sum(int(mask.sum()) for _, mask in parts)
        tokens = sum(len(ids) for ids, _ in parts)

        def loss_of(batch: MicroBatch) -> tuple[Tensor, MetricSum]:
            metrics = MetricSum()
            outputs = self.engine(batch)
            mask = batch.columns["mask"]
            total = cross_entropy_sum(outputs.logprobs, mask)
            loss = total / targets
            metrics.add("gpt_loss", total, mask.sum(), TOKEN)
            share = 0.0 if batch.is_dummy else batch.num_tokens / tokens
            return self.with_aux_loss(loss, outputs, share, metrics), metrics

        return self.backoff.accumulate(list(self._micro_batches(parts)), loss_of)

    def evaluate(self) -> dict[str, float]:
        """``eval gpt_loss``: mean over all supervised tokens of the evaluation data."""
        metrics = MetricSum()
        for start in range(0, len(self.eval_data), BLOCK):
            rows = range(start, min(start + BLOCK, len(self.eval_data)))
            for batch in self._micro_batches(self.eval_data.fetch(rows)):
                mask = batch.columns["mask"]
                logprobs = self.backoff.forward(batch, lambda part: self.engine(part).logprobs)
                metrics.add("eval gpt_loss", cross_entropy_sum(logprobs, mask), mask.sum(), TOKEN)
        return reduce_metrics(metrics)


def train(cfg: SFTConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    tokenizer = open_tokenizer(cfg)
    data, eval_data = read_data(cfg, tokenizer, open_sft_dataset, build_sft_dataset)
    steps = total_steps(cfg, data.num_usable, world)
    engine = train_engine(cfg, PolicyModel, load_causal_lm(cfg.model_path, cfg), steps)
    SFTTrainer(cfg, world, engine, tokenizer, data, eval_data, steps).fit()
