"""Supervised fine-tuning, and continued pre-training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.losses import cross_entropy_sum
from openrlhf.algorithms.metrics import STEP, TOKEN, MetricSum
from openrlhf.batching import MicroBatch, pack, plan_micro_batches
from openrlhf.config import SFTConfig
from openrlhf.datasets.sft import (
    LazySFTDataset,
    Row,
    SFTDataset,
    SFTFormat,
    build_sft_dataset,
    check_sft_columns,
    open_sft_dataset,
)
from openrlhf.datasets.sources import load_configured_rows, load_rows
from openrlhf.models.loading import check_model_folder, load_causal_lm, load_tokenizer
from openrlhf.models.logprobs import PolicyModel
from openrlhf.trainer.supervised import (
    SupervisedTrainer,
    optimizer_specs,
    reduce_metrics,
    run_command,
    total_steps,
)
from openrlhf.workers.backoff import MemoryBackoff
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.distributed import World

# Rows planned at a time in an evaluation; a plan over all of them would take long to make.
_EVAL_BLOCK = 1024
# As in the flag's description: weights below this switch the router loss off.
_AUX_LOSS_MIN = 1e-8


class SFTTrainer(SupervisedTrainer):
    """Minimises the mean negative log-likelihood of the supervised tokens of each batch."""

    def __init__(
        self,
        cfg: SFTConfig,
        world: World,
        engine: TrainEngine,
        tokenizer: PreTrainedTokenizerBase,
        data: SFTDataset | LazySFTDataset,
        eval_data: SFTDataset | None,
        steps: int,
    ) -> None:
        super().__init__(cfg, world, engine, tokenizer, len(data), eval_data is not None, steps)
        self.data = data
        self.eval_data = eval_data
        self._packing = cfg.packing_samples
        self._micro_batch_size = cfg.micro_train_batch_size
        self._max_tokens = cfg.micro_train_batch_size * cfg.max_len
        self._aux_coef = cfg.aux_loss_coef if cfg.aux_loss_coef > _AUX_LOSS_MIN else 0.0
        self._loss_mean = MetricSum()
        self._backoff = MemoryBackoff(self.engine)

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics shown in the line of each step."""
        return ("gpt_loss", "lr", "grad_norm")

    def take_rows(self) -> list[int]:
        """The rows of the next step."""
        return self.data.take(self.order, self.cfg.train_batch_size)

    def _micro_batches(self, rows: list[Row]) -> Iterator[MicroBatch]:
        """This rank's share of some rows, on its device; as many on every rank."""
        plan = plan_micro_batches(
            [len(ids) for ids, _ in rows],
            self.engine.data_parallel_size,
            micro_batch_size=None if self._packing else self._micro_batch_size,
            max_tokens=self._max_tokens if self._packing else None,
        )
        ids, masks = [ids for ids, _ in rows], [mask for _, mask in rows]
        for members in plan.ranks[self.engine.data_parallel_rank]:
            yield pack(ids, {"mask": masks}, members).to(self.engine.device)

    def train_step(self, rows: list[int]) -> MetricSum:
        """One optimizer step; the loss does not depend on ranks, micro-batches or packing."""
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
            if outputs.aux_loss is not None:
                share = 0.0 if batch.is_dummy else batch.num_tokens / tokens
                loss = loss + self._aux_coef * share * outputs.aux_loss
                metrics.add("aux_loss", outputs.aux_loss * share, share, TOKEN)
            return loss, metrics

        metrics = self._backoff.accumulate(list(self._micro_batches(parts)), loss_of)
        stats = self.engine.step()
        metrics.add("grad_norm", stats.grad_norm, 1.0, STEP)
        metrics.set_latest("lr", stats.lr)
        return self._with_running_mean(metrics)

    def _with_running_mean(self, metrics: MetricSum) -> MetricSum:
        """Add ``loss_mean``: gpt_loss over the steps since the metrics were last sent, each token once."""
        step = metrics.to_numbers()
        self._loss_mean = self._loss_mean.merge(MetricSum({"loss_mean": step["gpt_loss"]}))
        step = step.merge(self._loss_mean)
        if self.engine.step_count % max(1, self.cfg.logging_steps) == 0:
            self._loss_mean = MetricSum()
        return step

    def evaluate(self) -> dict[str, float]:
        """``eval gpt_loss``: mean over all supervised tokens of the evaluation data."""
        assert self.eval_data is not None
        metrics = MetricSum()
        with torch.no_grad():
            for start in range(0, len(self.eval_data), _EVAL_BLOCK):
                rows = range(start, min(start + _EVAL_BLOCK, len(self.eval_data)))
                for batch in self._micro_batches(self.eval_data.fetch(rows)):
                    mask = batch.columns["mask"]
                    total = cross_entropy_sum(self.engine(batch).logprobs, mask)
                    metrics.add("eval gpt_loss", total, mask.sum(), TOKEN)
        return reduce_metrics(metrics)


def read_data(
    cfg: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[SFTDataset | LazySFTDataset, SFTDataset | None]:
    """Rows to train on and, with ``--eval_dataset``, to evaluate on, as ids.

    Raises:
        DataError: a source can't be read, or has nothing to learn from.
    """
    assert cfg.dataset is not None
    rows = load_configured_rows(cfg)
    style = SFTFormat.from_config(cfg)
    check_sft_columns(rows, style, cfg.dataset)
    evaluation = None
    if cfg.eval_dataset:
        eval_rows = load_rows(cfg.eval_dataset, split=cfg.eval_split, use_modelscope=cfg.use_ms)
        check_sft_columns(eval_rows, style, cfg.eval_dataset)
        evaluation = build_sft_dataset(eval_rows, cfg, tokenizer, cfg.eval_dataset)
    return open_sft_dataset(rows, cfg, tokenizer, cfg.dataset), evaluation


def train(cfg: SFTConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    assert cfg.pretrain is not None
    check_model_folder(cfg.pretrain)
    tokenizer = load_tokenizer(
        cfg.pretrain, use_fast=not cfg.disable_fast_tokenizer, chat_template=cfg.tokenizer_chat_template
    )
    data, eval_data = read_data(cfg, tokenizer)
    steps = total_steps(cfg, data.num_usable, world)
    optimizer, scheduler = optimizer_specs(cfg, steps)
    model = load_causal_lm(cfg.pretrain, cfg)
    policy = PolicyModel(model, packing=cfg.packing_samples, aux_loss=cfg.aux_loss_coef > _AUX_LOSS_MIN)
    engine = TrainEngine(policy, cfg, optimizer, scheduler)
    SFTTrainer(cfg, world, engine, tokenizer, data, eval_data, steps).fit()


def run(cfg: SFTConfig) -> int:
    """Train; returns the exit status."""
    return run_command(cfg, train)
