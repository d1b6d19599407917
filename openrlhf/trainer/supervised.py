"""The loop that SFT, reward-model and DPO training share: steps, metrics, evaluation, checkpoints, resume."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.algorithms.metrics import STEP, TOKEN, MetricSum
from openrlhf.config import DPOConfig, KTOConfig, RMConfig, SFTConfig
from openrlhf.config.derive import derive
from openrlhf.datasets.order import ResumableOrder
from openrlhf.datasets.sources import DataError, load_configured_rows, load_rows, needed_columns, text_columns
from openrlhf.models.folder import check_model_folder
from openrlhf.models.loading import load_tokenizer, note_unknown_tokens
from openrlhf.models.logprobs import Backbone
from openrlhf.trainer.checkpoint import Checkpoints
from openrlhf.trainer.console import Console
from openrlhf.trainer.metrics_log import MetricsLogger
from openrlhf.trainer.sequences import row_limits
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger
from openrlhf.utils.process import seed_process
from openrlhf.workers.backoff import SUPERVISED_ADVICE, MemoryBackoff
from openrlhf.workers.checkpoint_writes import check_places
from openrlhf.workers.deepspeed_engine import SchedulerSpec, TrainEngine
from openrlhf.workers.distributed import World, gather_objects, init_distributed, shutdown
from openrlhf.workers.optimizer import optimizer_spec

logger = get_logger(__name__)

SupervisedConfig = SFTConfig | RMConfig | DPOConfig | KTOConfig
Data = TypeVar("Data")

# As in the flag's description: weights below this switch the router loss off.
_AUX_LOSS_MIN = 1e-8


def run_command(cfg: SupervisedConfig, train: Callable[[Any, World], None]) -> int:
    """Join the process group, train, and turn explained failures into exit status 1.

    A rank that fails ends at once, without waiting for the others; their launcher ends them.
    """
    try:
        world = init_distributed(cfg.local_rank)
        if world.is_first:
            check_places(cfg)
        seed_process(cfg.seed, cfg.full_determinism)
        train(cfg, world)
    except ExplainedError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return 1
    shutdown()
    return 0


def open_tokenizer(cfg: SupervisedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the model to train, whose folder is looked at first.

    Raises:
        ModelLoadError: the model or its tokenizer is not there, or not complete.
    """
    check_model_folder(cfg.model_path)
    tokenizer = load_tokenizer(
        cfg.model_path, use_fast=not cfg.disable_fast_tokenizer, chat_template=cfg.tokenizer_chat_template
    )
    note_unknown_tokens(tokenizer, cfg.model_path)
    return tokenizer


def read_data(
    cfg: SupervisedConfig,
    tokenizer: PreTrainedTokenizerBase,
    build: Callable[[Dataset, Any, PreTrainedTokenizerBase, str], Data],
    build_eval: Callable[[Dataset, Any, PreTrainedTokenizerBase, str], Any] | None = None,
) -> tuple[Data, Any]:
    """Rows to train on and, with ``--eval_dataset``, to evaluate on, as ids.

    Args:
        cfg: the sources.
        tokenizer: that of the model.
        build: turns rows into ids.
        build_eval: the same for those to evaluate on, where that is done otherwise.

    Raises:
        DataError: a source can't be read, or has nothing to learn from.
    """
    rows = load_configured_rows(cfg)
    evaluation = None
    if cfg.eval_dataset:  # first, so that mistakes in it show before many rows have become ids
        held_out = load_rows(
            cfg.eval_dataset,
            split=cfg.eval_split,
            use_modelscope=cfg.use_ms,
            columns=needed_columns(cfg),
            texts=text_columns(cfg),
        )
        evaluation = (build_eval or build)(held_out, cfg, tokenizer, cfg.eval_dataset)
    return build(rows, cfg, tokenizer, str(cfg.dataset)), evaluation


def aux_coefficient(cfg: SupervisedConfig) -> float:
    """Weight of the router loss; 0 when it is off."""
    return cfg.aux_loss_coef if cfg.aux_loss_coef > _AUX_LOSS_MIN else 0.0


def total_steps(cfg: SupervisedConfig, num_rows: int, world: World) -> int:
    """Optimizer steps of a run.

    Raises:
        DataError: not even one batch can be filled.
    """
    steps = derive(cfg, num_rows, world.size).total_steps
    if not steps:
        raise DataError(
            f"{num_rows} usable row(s) in {cfg.max_epochs} epoch(s) do not fill one batch of --train_batch_size "
            f"{cfg.train_batch_size}; lower it to at most {num_rows * cfg.max_epochs}, or give more data"
        )
    return steps


def train_engine(cfg: SupervisedConfig, kind: type[Backbone], model: nn.Module, steps: int) -> TrainEngine:
    """A loaded model as the flags train it."""
    wrapped = kind(model, packing=cfg.packing_samples, aux_loss=aux_coefficient(cfg) > 0)
    scheduler = SchedulerSpec(cfg.lr_scheduler, steps, cfg.lr_warmup_ratio, cfg.min_lr_ratio)
    return TrainEngine(wrapped, cfg, optimizer_spec(cfg, cfg.learning_rate), scheduler)


def reduce_metrics(metrics: MetricSum) -> dict[str, float]:
    """Merge the parts of all ranks; every rank gets the values."""
    return MetricSum.merged(gather_objects(metrics)).values()


class SupervisedTrainer(ABC):
    """Trains on rows in a resumable order; batches run on across the end of an epoch.

    Args:
        cfg: flags of the command.
        world: place of this process.
        engine: the trained model.
        tokenizer: saved with it.
        data: rows to train on.
        eval_data: rows to evaluate on, if there are any.
        steps: optimizer steps of the whole run.
    """

    sequences_per_row: ClassVar[int] = 1
    """They must be in the same micro-batch."""
    headline: ClassVar[tuple[str, ...]]
    """Metrics shown in the line of each step."""
    running_means: ClassVar[dict[str, str]]
    """Metric of a step -> name of its mean over the steps since metrics were last sent."""

    def __init__(
        self,
        cfg: SupervisedConfig,
        world: World,
        engine: TrainEngine,
        tokenizer: PreTrainedTokenizerBase,
        data: Sized,
        eval_data: Sized | None,
        steps: int,
    ) -> None:
        self.cfg = cfg
        self.world = world
        self.engine = engine
        self.tokenizer = tokenizer
        self.data: Any = data
        self.eval_data: Any = eval_data
        self.steps = steps
        self.backoff = MemoryBackoff(engine, self.sequences_per_row, SUPERVISED_ADVICE)
        self.limits = row_limits(cfg, self.sequences_per_row)
        self.order = ResumableOrder(len(data), cfg.seed)
        self.checkpoints = Checkpoints(cfg, engine, tokenizer, self.order)
        self.console = Console(quiet=not world.is_first)
        self.logger: MetricsLogger | None = None
        self._window = MetricSum()

    @abstractmethod
    def accumulate(self, rows: list[int]) -> MetricSum:
        """Forward and backward passes of one optimizer step, on these rows; this rank's part of the metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Metrics over the whole evaluation data, the same on every rank."""

    def take_rows(self) -> list[int]:
        """The rows of the next step, all that every rank trains on together."""
        return self.order.take(self.cfg.train_batch_size)

    def with_aux_loss(self, loss: Tensor, outputs: Any, share: float, metrics: MetricSum) -> Tensor:
        """The loss of a micro-batch that has this share of a step's tokens, with the router loss, if there is one."""
        if outputs.aux_loss is None:
            return loss
        metrics.add("aux_loss", outputs.aux_loss * share, share, TOKEN)
        return loss + aux_coefficient(self.cfg) * share * outputs.aux_loss

    def hf_config(self) -> dict[str, Any] | None:
        """Entries of config.json to set when the model is saved."""
        return None

    def fit(self) -> None:
        """Train to the end (from a checkpoint, if there is one), and save the model.

        Raises:
            ExplainedError: one that says what to do.
        """
        self.checkpoints.resume()
        step = self.engine.step_count
        if self.world.is_first:
            self.logger = MetricsLogger(self.cfg, Path(self.cfg.run_folder), goes_on=step > 0)
        try:
            if step >= self.steps and self.world.is_first:
                logger.warning("the checkpoint is at step %d of %d: nothing is left to train", step, self.steps)
            while step < self.steps:
                step += 1
                self._step(step)
            self.checkpoints.save_final(self.hf_config())  # before anything that has to do with metrics
            self.console.say(f"done: the model is in {self.cfg.save_path}")
        finally:
            if self.logger is not None:
                self.logger.close()

    def _step(self, step: int) -> None:
        epoch = self.order.epoch
        self.console.new_step()
        with self.console.phase("train"):
            metrics = self._train(step)
        if step % max(1, self.cfg.logging_steps) == 0 or step == self.steps:
            shown = {name: metrics[name] for name in self.headline if name in metrics}
            self.console.step_line(step, self.steps, shown)
        if self.eval_data is not None and self._evaluates(step, epoch):
            self._evaluate(step)
        if self.cfg.save_steps > 0 and step % self.cfg.save_steps == 0:
            self.checkpoints.save(step, hf_config=self.hf_config())

    def _train(self, step: int) -> dict[str, float]:
        self.engine.train()
        parts = self.accumulate(self.take_rows())
        stats = self.engine.step()
        parts.add("grad_norm", stats.grad_norm, 1.0, STEP)
        parts.set_latest("lr", stats.lr)
        metrics = reduce_metrics(self._with_running_means(parts))
        if self.order.skipped:
            metrics["skipped_rows"] = self.order.skipped
        metrics["epoch"] = self.order.consumed / self.order.num_rows
        if self.logger is not None:
            self.logger.log("train", step, metrics)
        return metrics

    def _with_running_means(self, metrics: MetricSum) -> MetricSum:
        step = metrics.to_numbers()
        named = {mean: step[name] for name, mean in self.running_means.items()}
        self._window = self._window.merge(MetricSum(named))
        step = step.merge(self._window)
        if self.engine.step_count % max(1, self.cfg.logging_steps) == 0:
            self._window = MetricSum()
        return step

    def _evaluates(self, step: int, epoch_before: int) -> bool:
        if step == self.steps:
            return True
        if self.cfg.eval_steps > 0:
            return step % self.cfg.eval_steps == 0
        return self.order.epoch > epoch_before

    def _evaluate(self, step: int) -> None:
        self.engine.eval()
        metrics = self.evaluate()
        if self.logger is not None:
            self.logger.log("eval", step, metrics)
        self.console.say("eval  " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
