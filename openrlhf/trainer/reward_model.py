"""Reward models from pairs of answers (Bradley-Terry)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from openrlhf.algorithms.losses import pairwise_logexp_loss, pairwise_sigmoid_loss
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.batching import MicroBatch
from openrlhf.config import RMConfig
from openrlhf.datasets.preference import PreferenceDataset, build_preference_dataset
from openrlhf.models.loading import load_sequence_regression
from openrlhf.models.logprobs import RewardModel
from openrlhf.trainer.preference import PreferenceTrainer
from openrlhf.trainer.supervised import open_tokenizer, read_data, total_steps, train_engine
from openrlhf.utils.logging import get_logger
from openrlhf.workers.distributed import World, gather_objects

logger = get_logger(__name__)

# Without --eval_dataset, the first rows of the training data are evaluated: one of so many, and at least one.
_EVAL_SHARE = 100


class RewardModelTrainer(PreferenceTrainer):
    """Raises the score of the chosen answer over that of the rejected one; scores are read at the end token."""

    sequences_per_row: ClassVar[int] = 2
    headline: ClassVar[tuple[str, ...]] = ("loss", "acc", "lr", "grad_norm")
    running_means: ClassVar[dict[str, str]] = {"loss": "loss_mean", "acc": "acc_mean"}
    eval_names: ClassVar[dict[str, str]] = {"loss": "eval_loss", "acc": "acc_mean", "reward_margin": "reward_margin"}
    cfg: RMConfig
    data: PreferenceDataset
    eval_data: PreferenceDataset

    _eval_scores: list[float]
    _stats: tuple[int, float, float] | None = None

    def row_losses(self, rows: list[int], batch: MicroBatch, outputs: Any, metrics: MetricSum) -> Tensor:
        """Pairwise loss of each pair."""
        chosen, rejected = outputs.scores[0::2], outputs.scores[1::2]
        if self.cfg.loss == "logexp":
            losses = pairwise_logexp_loss(chosen, rejected)
        else:
            margin = None
            if self.cfg.margin_loss:
                data = self.eval_data if self.evaluating else self.data
                margin = torch.from_numpy(data.margins[rows]).to(chosen)
            losses = pairwise_sigmoid_loss(chosen, rejected, margin)
        metrics.add_values("loss", losses.detach())
        metrics.add_values("acc", chosen > rejected)
        metrics.add_values("chosen_reward", chosen.detach())
        metrics.add_values("reject_reward", rejected.detach())
        metrics.add_values("reward_margin", (chosen - rejected).detach())
        if self.evaluating:
            self._eval_scores += outputs.scores.tolist()
        return losses

    def evaluate(self) -> dict[str, float]:
        """``eval_loss``, ``acc_mean``, ``reward_margin``, and mean and standard deviation of all scores."""
        self._eval_scores = []
        values = super().evaluate()
        parts = gather_objects(self._eval_scores)[:: self.engine.data_copies]
        # sorted, so that the last bit doesn't depend on which rank had which pair
        scores = torch.tensor(sorted(score for part in parts for score in part), dtype=torch.float64)
        mean, std = float(scores.mean()), float(scores.std())
        self._stats = (self.engine.step_count, mean, std)
        return {**values, "reward_mean": mean, "reward_std": std}

    def _evaluates(self, step: int, epoch_before: int) -> bool:
        # at the end of each epoch also when --eval_steps says something else
        return super()._evaluates(step, epoch_before) or self.order.epoch > epoch_before

    def hf_config(self) -> dict[str, Any] | None:
        """Mean and standard deviation of the scores of these very weights, and what stands for padding.

        A checkpoint without a Hugging Face copy is not worth an evaluation: it gets them from one that was just made.
        """
        step = self.engine.step_count
        if (self.cfg.save_hf_ckpt or step >= self.steps) and (self._stats is None or self._stats[0] != step):
            self.engine.eval()
            self.evaluate()
        scale: dict[str, Any] = {}
        if self._stats is not None and self._stats[0] == step:
            scale = {"mean": self._stats[1], "std": self._stats[2], "normalize_reward": False}
        # transformers reads the score at the last token that isn't padding, so padding must not be the end token
        pad = self.tokenizer.pad_token_id
        pad = pad if pad != self.tokenizer.eos_token_id else None
        return {**scale, "pad_token_id": pad}


def _read_data(cfg: RMConfig, tokenizer: Any) -> tuple[PreferenceDataset, PreferenceDataset]:
    data, evaluation = read_data(cfg, tokenizer, build_preference_dataset)
    if evaluation is not None:
        return data, evaluation
    count = max(1, len(data) // _EVAL_SHARE)
    logger.info("no --eval_dataset: mean and std of the rewards are measured on the first %d training pair(s)", count)
    return data, data.first(count)


def train(cfg: RMConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    tokenizer = open_tokenizer(cfg)
    data, eval_data = _read_data(cfg, tokenizer)
    steps = total_steps(cfg, len(data), world)
    model = load_sequence_regression(cfg.model_path, cfg, head_prefix=cfg.value_head_prefix)
    engine = train_engine(cfg, RewardModel, model, steps)
    RewardModelTrainer(cfg, world, engine, tokenizer, data, eval_data, steps).fit()
