"""Checkpoints of the trainers without Ray (SFT, reward model, DPO): one model, one position in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import TrainerOptions
from openrlhf.datasets.order import ResumableOrder
from openrlhf.utils.logging import get_logger
from openrlhf.workers.checkpoint_files import earlier_run, nothing_to_resume, resume_tag
from openrlhf.workers.deepspeed_engine import TrainEngine

logger = get_logger(__name__)


class Checkpoints:
    """Saves and restores a run. All ranks call every method.

    Args:
        cfg: checkpoint flags.
        engine: the trained model.
        tokenizer: saved beside each Hugging Face copy.
        order: the position in the data.
    """

    def __init__(
        self, cfg: TrainerOptions, engine: TrainEngine, tokenizer: PreTrainedTokenizerBase, order: ResumableOrder
    ) -> None:
        self._cfg = cfg
        self._engine = engine
        self._tokenizer = tokenizer
        self._order = order
        self.root = Path(cfg.ckpt_path)

    def resume(self) -> None:
        """With ``--load_checkpoint``, restore the newest checkpoint, if there is one; without it, tell of one.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit this run.
            DataError: the data is not the same.
        """
        if not self._cfg.load_checkpoint:
            _tell(earlier_run(self.root))
            return
        tag = resume_tag(self.root, self._cfg.use_ds_universal_ckpt)
        if tag is None:
            _tell(nothing_to_resume(self.root))
            return
        state = self._engine.load_checkpoint(self.root, tag)
        # `convert hf2resume` knows the number of samples, but not the data
        order = state.get("order") or {**self._order.state_dict(), "consumed": state["consumed_samples"]}
        self._order.load_state_dict(order)
        logger.info("resumed from %s: %d rows consumed", self.root / tag, self._order.consumed)

    def save(self, step: int, hf_config: dict[str, Any] | None = None) -> None:
        """Write ``global_step<N>``, and ``global_step<N>_hf`` before it with ``--save_hf_ckpt``."""
        tag = f"global_step{step}"
        if self._cfg.save_hf_ckpt:
            self._engine.save_hf(self.root / f"{tag}_hf", self._tokenizer, hf_config)
        if self._cfg.disable_ds_ckpt:
            return
        state = {"consumed_samples": self._order.consumed, "order": self._order.state_dict()}
        limits = self._cfg.max_ckpt_num, self._cfg.max_ckpt_mem
        self._engine.save_checkpoint(self.root, tag, state, *limits, self._tokenizer, hf_config)

    def save_final(self, hf_config: dict[str, Any] | None = None) -> None:
        """Write the model and its tokenizer to ``save_path``."""
        self._engine.save_hf(self._cfg.save_path, self._tokenizer, hf_config)


def _tell(message: str | None) -> None:
    """Warn once, not on every rank."""
    if message is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning("%s", message)
