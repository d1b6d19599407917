"""Reward models from pairs of answers (Bradley-Terry)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.algorithms.losses import pairwise_logexp_loss, pairwise_sigmoid_loss
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.batching import MicroBatch
from openrlhf.config import RMConfig
from openrlhf.datasets.preference import PreferenceDataset, build_preference_dataset
from openrlhf.datasets.sources import load_configured_rows, load_rows
from openrlhf.models.loading import check_model_folder, load_sequence_regression, load_tokenizer
from openrlhf.models.logprobs import RewardModel, ScoreOutputs
from openrlhf.trainer.preference import PreferenceTrainer, aux_coefficient
from openrlhf.trainer.supervised import optimizer_specs, run_command, total_steps
from openrlhf.utils.logging import get_logger
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.distributed import World

logger = get_logger(__name__)

# Without --eval_dataset, the first rows of the training data are evaluated: one of so many, and at least one.
_EVAL_SHARE = 100


class TrainedRewardModel(nn.Module):
    """A reward model whose forward pass also gives the router loss."""

    def __init__(self, reward: RewardModel) -> None:
        super().__init__()
        self.reward = reward

    @property
    def hf_model(self) -> nn.Module:
        """The wrapped transformers (or peft) model."""
        return self.reward.hf_model

    @property
    def config(self) -> PretrainedConfig:
        """Of the wrapped model; DeepSpeed looks for it here."""
        return self.reward.config

    def forward(self, batch: MicroBatch) -> ScoreOutputs:
        """Scores ``[S]`` and the router loss."""
        return self.reward.outputs(batch)


class RewardModelTrainer(PreferenceTrainer):
    """Raises the score of the chosen answer over that of the rejected one; scores are read at the end token."""

    sequences_per_row: ClassVar[int] = 2
    running_means: ClassVar[dict[str, str]] = {"loss": "loss_mean", "acc": "acc_mean"}
    eval_names: ClassVar[dict[str, str]] = {"loss": "eval_loss", "acc": "acc_mean", "reward_margin": "reward_margin"}
    cfg: RMConfig
    data: PreferenceDataset
    eval_data: PreferenceDataset

    _eval_scores: list[float]
    _stats: tuple[int, float, float] | None = None

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics shown in the line of each step."""
        return ("loss", "acc", "lr", "grad_norm")

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

    def anchor(self, outputs: Any) -> Tensor:
        """The scores."""
        return outputs.scores

    def evaluate(self) -> dict[str, float]:
        """``eval_loss``, ``acc_mean``, ``reward_margin``, and mean and standard deviation of all scores."""
        self._eval_scores = []
        values = super().evaluate()
        parts: list[Any] = [self._eval_scores]
        if self.world.size > 1:
            parts = [None] * self.world.size
            dist.all_gather_object(parts, self._eval_scores)
        # sorted, so that the last bit doesn't depend on which rank had which pair
        own = parts[:: self.engine.data_copies]
        scores = torch.tensor(sorted(score for part in own for score in part), dtype=torch.float64)
        mean, std = float(scores.mean()), float(scores.std())
        self._stats = (self.engine.step_count, mean, std)
        return {**values, "reward_mean": mean, "reward_std": std}

    def _evaluates(self, step: int, epoch_before: int) -> bool:
        # at the end of each epoch also when --eval_steps says something else
        return super()._evaluates(step, epoch_before) or self.order.epoch > epoch_before

    def hf_config(self) -> dict[str, Any] | None:
        """Mean and standard deviation of the scores of these very weights, and the name of the head."""
        step = self.engine.step_count
        if not self.cfg.save_hf_ckpt and step < self.steps:
            return None  # nothing is going to be written
        if self._stats is None or self._stats[0] != step:
            self.engine.eval()
            self.evaluate()
        assert self._stats is not None
        _, mean, std = self._stats
        # transformers reads the score at the last token that isn't padding, so padding must not be the end token
        pad = self.tokenizer.pad_token_id
        pad = pad if pad != self.tokenizer.eos_token_id else None
        return {"mean": mean, "std": std, "normalize_reward": False, "pad_token_id": pad}


def _read_data(cfg: RMConfig, tokenizer: Any) -> tuple[PreferenceDataset, PreferenceDataset]:
    assert cfg.dataset is not None
    rows = load_configured_rows(cfg)
    data = build_preference_dataset(rows, cfg, tokenizer, cfg.dataset)
    if cfg.eval_dataset:
        eval_rows = load_rows(cfg.eval_dataset, split=cfg.eval_split, use_modelscope=cfg.use_ms)
        return data, build_preference_dataset(eval_rows, cfg, tokenizer, cfg.eval_dataset)
    count = max(1, len(data) // _EVAL_SHARE)
    logger.info("no --eval_dataset: mean and std of the rewards are measured on the first %d training pair(s)", count)
    return data, data.first(count)


def train(cfg: RMConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    check_model_folder(cfg.model_path)
    tokenizer = load_tokenizer(
        cfg.model_path, use_fast=not cfg.disable_fast_tokenizer, chat_template=cfg.tokenizer_chat_template
    )
    data, eval_data = _read_data(cfg, tokenizer)
    steps = total_steps(cfg, len(data), world)
    optimizer, scheduler = optimizer_specs(cfg, steps)
    model = load_sequence_regression(cfg.model_path, cfg, head_prefix=cfg.value_head_prefix)
    reward = RewardModel(model, packing=cfg.packing_samples, aux_loss=aux_coefficient(cfg) > 0)
    engine = TrainEngine(TrainedRewardModel(reward), cfg, optimizer, scheduler)
    RewardModelTrainer(cfg, world, engine, tokenizer, data, eval_data, steps).fit()


def run(cfg: RMConfig) -> int:
    """Train; returns the exit status."""
    return run_command(cfg, train)
