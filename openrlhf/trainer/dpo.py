"""Direct preference optimization, with its IPO and conservative variants."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.losses import dpo_loss
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.algorithms.packed import sequence_sum
from openrlhf.batching import MicroBatch
from openrlhf.config import DPOConfig
from openrlhf.datasets.order import ResumableOrder
from openrlhf.datasets.preference import PreferenceDataset, build_preference_dataset
from openrlhf.models.folder import check_model_folder
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.trainer.preference import PreferenceTrainer
from openrlhf.trainer.reference import Wanted, reference_logprobs, require_scored
from openrlhf.trainer.sequences import answer_logprobs, row_limits
from openrlhf.trainer.supervised import open_tokenizer, read_data, total_steps, train_engine
from openrlhf.workers.distributed import World

# As in the flag's description: weights below this switch the NLL term off.
_NLL_MIN = 1e-8


class DPOTrainer(PreferenceTrainer):
    """Raises the log-prob of the chosen answer against the rejected one, both relative to the reference model."""

    sequences_per_row: ClassVar[int] = 2
    headline: ClassVar[tuple[str, ...]] = ("loss", "acc", "lr", "grad_norm")
    running_means: ClassVar[dict[str, str]] = {"loss": "loss_mean", "acc": "acc_mean"}
    eval_names: ClassVar[dict[str, str]] = {"loss": "eval_loss", "acc": "acc_mean"}
    cfg: DPOConfig

    reference: Tensor
    """float64 ``[pairs, 2]``: reference log-probs of chosen and rejected; NaN for rows that the run doesn't reach."""
    eval_reference: Tensor

    def row_losses(self, rows: list[int], batch: MicroBatch, outputs: Any, metrics: MetricSum) -> Tensor:
        """Preference loss, plus the weighted NLL of the chosen answer, of each pair."""
        cfg = self.cfg
        logprobs = answer_logprobs(batch, outputs.logprobs)
        reference = (self.eval_reference if self.evaluating else self.reference)[rows]
        reference = require_scored(reference, len(rows)).to(logprobs.device)
        chosen, rejected = logprobs[0::2], logprobs[1::2]
        result = dpo_loss(
            chosen,
            rejected,
            reference[:, 0],
            reference[:, 1],
            beta=cfg.beta,
            label_smoothing=cfg.label_smoothing,
            ipo=cfg.ipo,
        )
        metrics.add_values("loss", result.per_pair.detach())
        metrics.add_values("acc", result.chosen_rewards > result.rejected_rewards)
        metrics.add_values("chosen_reward", result.chosen_rewards)
        metrics.add_values("reject_reward", result.rejected_rewards)
        if cfg.nll_loss_coef <= _NLL_MIN:
            return result.per_pair
        tokens = sequence_sum(batch.columns["mask"].double(), batch.cu_seqlens)[0::2]
        nll = -chosen / tokens
        metrics.add_values("nll_loss", nll.detach())
        return result.per_pair + cfg.nll_loss_coef * nll


def score_reference(
    cfg: DPOConfig, world: World, data: PreferenceDataset, eval_data: PreferenceDataset | None, steps: int
) -> tuple[Tensor, Tensor]:
    """Reference log-probs ``[pairs, 2]`` of the training pairs that the run reaches, and of the evaluation pairs."""
    order = ResumableOrder(len(data), cfg.seed)
    rows = np.unique(order.take(min(steps * cfg.train_batch_size, len(data))))
    limits = row_limits(cfg, DPOTrainer.sequences_per_row)
    halves = (2 * rows[:, None] + np.arange(2)).flatten()
    wanted = [Wanted("train", data, halves.tolist(), limits)]
    if eval_data is not None:
        wanted.append(Wanted("eval", eval_data, range(2 * len(eval_data)), limits))
    assert cfg.ref_pretrain is not None
    found = reference_logprobs(cfg, world, cfg.ref_pretrain, wanted)
    reference = torch.full((len(data), 2), torch.nan, dtype=torch.float64)
    reference[torch.from_numpy(rows)] = found["train"].view(-1, 2)
    return reference, found["eval"].view(-1, 2) if eval_data is not None else reference[:0]


def train(cfg: DPOConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    check_model_folder(str(cfg.ref_pretrain))
    tokenizer = open_tokenizer(cfg)
    data, eval_data = read_data(cfg, tokenizer, build_preference_dataset)
    steps = total_steps(cfg, len(data), world)
    # before the policy is there, so that the two are never in memory together
    reference, eval_reference = score_reference(cfg, world, data, eval_data, steps)
    engine = train_engine(cfg, PolicyModel, load_causal_lm(cfg.model_path, cfg), steps)
    trainer = DPOTrainer(cfg, world, engine, tokenizer, data, eval_data, steps)
    trainer.reference, trainer.eval_reference = reference, eval_reference
    trainer.fit()
