"""Kahneman-Tversky optimization (arXiv:2402.01306): preference learning from single answers, good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.losses import kto_loss, kto_reference_point
from openrlhf.algorithms.metrics import SEQUENCE, STEP, MetricSum
from openrlhf.batching import MicroBatch
from openrlhf.config import KTOConfig
from openrlhf.datasets.order import ResumableOrder
from openrlhf.datasets.unpaired import UnpairedDataset, build_unpaired_dataset
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.logprobs import PolicyModel
from openrlhf.trainer.preference import PreferenceTrainer
from openrlhf.trainer.reference import Wanted, reference_logprobs, require_scored
from openrlhf.trainer.sequences import all_answer_logprobs, answer_logprobs, row_limits
from openrlhf.trainer.supervised import open_tokenizer, read_data, total_steps, train_engine
from openrlhf.workers.distributed import World


class MismatchedAnswers:
    """The prompt of each row with the answer of the next row of its batch (the last one with the first).

    Args:
        rows: rows of ``data``, batch after batch.
        batch: rows of a batch.
        max_len: most tokens of a prompt with its answer, which is cut.
    """

    def __init__(self, data: UnpairedDataset, rows: Sequence[int], batch: int, max_len: int) -> None:
        self._data = data
        self._prompts = np.asarray(rows, dtype=np.int64)
        self._answers = np.roll(self._prompts.reshape(-1, batch), -1, axis=1).flatten()
        self._max_len = max_len
        prompt_lengths = (data.lengths - data.answer_lengths)[self._prompts]
        self.lengths = np.minimum(prompt_lengths + data.answer_lengths[self._answers], max_len)

    def fetch(self, indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids and answer mask, by position in ``rows``."""
        places = [int(i) for i in indices]
        heads = self._data.fetch([int(self._prompts[i]) for i in places])
        tails = self._data.fetch([int(self._answers[i]) for i in places])
        result = []
        for (head, head_mask), (tail, tail_mask) in zip(heads, tails, strict=True):
            prompt, answer = head[~head_mask], tail[tail_mask]
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            result.append((np.concatenate([prompt, answer])[: self._max_len], mask[: self._max_len]))
        return result


@dataclass(frozen=True)
class Reference:
    """What the reference model says of rows, float64.

    Attributes:
        own: log-probs of the rows' own answers; NaN for rows that the run doesn't reach.
        mismatched: the rows' prompts with other answers; None for a single row.
        mismatched_logprobs: of those, by position.
    """

    own: Tensor
    mismatched: MismatchedAnswers | None
    mismatched_logprobs: Tensor


class KTOTrainer(PreferenceTrainer):
    """Makes good answers more and bad answers less likely, relative to the reference model.

    The reference point of a step is estimated over its whole batch, on all ranks, before the loss.
    """

    headline: ClassVar[tuple[str, ...]] = ("kto_loss", "kl", "lr", "grad_norm")
    running_means: ClassVar[dict[str, str]] = {"kto_loss": "loss_mean"}
    eval_names: ClassVar[dict[str, str]] = {
        "kto_loss": "eval_loss",
        "chosen_reward": "chosen_reward",
        "reject_reward": "reject_reward",
    }
    cfg: KTOConfig
    data: UnpairedDataset
    eval_data: UnpairedDataset

    reference: Reference
    eval_reference: Reference | None
    _kl = 0.0

    def row_losses(self, rows: list[int], batch: MicroBatch, outputs: Any, metrics: MetricSum) -> Tensor:
        """Loss of each answer."""
        cfg = self.cfg
        data, reference = (self.eval_data, self.eval_reference) if self.evaluating else (self.data, self.reference)
        assert reference is not None
        logprobs = answer_logprobs(batch, outputs.logprobs)
        good = torch.from_numpy(data.labels[rows]).to(logprobs.device)
        result = kto_loss(
            logprobs,
            reference.own[rows].to(logprobs.device),
            good,
            self._kl,
            beta=cfg.beta,
            desirable_weight=cfg.desirable_loss_weight,
            undesirable_weight=cfg.undesirable_loss_weight,
        )
        metrics.add_values("kto_loss", result.per_answer.detach())
        metrics.add("chosen_reward", result.rewards[good].sum(), good.sum(), SEQUENCE)
        metrics.add("reject_reward", result.rewards[~good].sum(), (~good).sum(), SEQUENCE)
        return result.per_answer

    def _reference_point(self, reference: Reference, places: range) -> float:
        """From the mismatched answers at some positions; 0 where there are none."""
        if reference.mismatched is None:
            return 0.0
        expected = require_scored(reference.mismatched_logprobs[places.start : places.stop], len(places))
        logprobs = all_answer_logprobs(self.backoff, self.world, reference.mismatched, places, self.limits)
        return kto_reference_point(logprobs, expected)

    def accumulate(self, rows: list[int]) -> MetricSum:
        """See the base class; the reference point comes first."""
        end = self.order.consumed
        self.engine.eval()  # LoRA dropout must not reach the estimate
        self._kl = self._reference_point(self.reference, range(end - len(rows), end))
        self.engine.train()
        metrics = super().accumulate(rows)
        metrics.add("kl", self._kl, 1.0, STEP)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """``eval_loss`` with the reference point of the whole evaluation data, and both implicit rewards."""
        assert self.eval_reference is not None
        self._kl = self._reference_point(self.eval_reference, range(len(self.eval_data)))
        return super().evaluate()


def score_reference(
    cfg: KTOConfig, world: World, data: UnpairedDataset, eval_data: UnpairedDataset | None, steps: int
) -> tuple[Reference, Reference | None]:
    """The reference model on the training rows that the run reaches, and on the evaluation rows."""
    run_rows = ResumableOrder(len(data), cfg.seed).take(steps * cfg.train_batch_size)
    used = np.unique(run_rows)
    limits = row_limits(cfg, KTOTrainer.sequences_per_row)
    mismatched = MismatchedAnswers(data, run_rows, cfg.train_batch_size, cfg.max_len)
    wanted = [
        Wanted("own", data, used.tolist(), limits),
        Wanted("mismatched", mismatched, range(len(run_rows)), limits),
    ]
    eval_mismatched = None
    if eval_data is not None:
        wanted.append(Wanted("eval own", eval_data, range(len(eval_data)), limits))
        if len(eval_data) > 1:
            eval_mismatched = MismatchedAnswers(eval_data, range(len(eval_data)), len(eval_data), cfg.max_len)
            wanted.append(Wanted("eval mismatched", eval_mismatched, range(len(eval_data)), limits))
    found = reference_logprobs(cfg, world, cfg.model_path, wanted)
    own = torch.full((len(data),), torch.nan, dtype=torch.float64)
    own[torch.from_numpy(used)] = found["own"]
    reference = Reference(own, mismatched, found["mismatched"])
    if eval_data is None:
        return reference, None
    return reference, Reference(found["eval own"], eval_mismatched, found.get("eval mismatched", own[:0]))


def train(cfg: KTOConfig, world: World) -> None:
    """Everything between the parsed flags and the saved model, on one rank."""
    tokenizer = open_tokenizer(cfg)
    data, eval_data = read_data(cfg, tokenizer, build_unpaired_dataset)
    steps = total_steps(cfg, len(data), world)
    # before the policy is there, so that the two are never in memory together
    reference, eval_reference = score_reference(cfg, world, data, eval_data, steps)
    engine = train_engine(cfg, PolicyModel, load_causal_lm(cfg.model_path, cfg), steps)
    trainer = KTOTrainer(cfg, world, engine, tokenizer, data, eval_data, steps)
    trainer.reference, trainer.eval_reference = reference, eval_reference
    trainer.fit()
