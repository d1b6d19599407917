"""Scores of texts by a reward model, read at the end-of-sequence token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.batching import pack
from openrlhf.config import BatchInferenceConfig, ServeRMConfig
from openrlhf.datasets import text as texts
from openrlhf.models.loading import load_tokenizer, vocabulary_size
from openrlhf.models.logprobs import RewardModel
from openrlhf.tools.loading import LoadSettings, load_for_inference


class Encoded(NamedTuple):
    """Token ids of a text, never empty, and whether tokens were left out to fit."""

    token_ids: list[int]
    truncated: bool


class RewardScorer:
    """A reward model with its tokenizer.

    Args:
        model: on its device.
        max_len: most tokens of a text, the end token included.
    """

    def __init__(self, model: RewardModel, tokenizer: PreTrainedTokenizerBase, max_len: int) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self._max_len = max_len
        self._device = next(model.parameters()).device

    @classmethod
    def load(
        cls, path: str, cfg: BatchInferenceConfig | ServeRMConfig, device: torch.device, normalize: bool = False
    ) -> RewardScorer:
        """Load a reward model for inference, as the flags of a command say.

        Args:
            normalize: subtract the mean and divide by the std that the model's config.json has.

        Raises:
            ModelLoadError: it can't be read, has no head, or no mean and std although ``normalize`` asks for them.
        """
        tokenizer = load_tokenizer(path, use_fast=not cfg.disable_fast_tokenizer)
        hf_model = load_for_inference(path, LoadSettings.of(cfg), is_rm=True, head_prefix=cfg.value_head_prefix)
        model = RewardModel(hf_model, packing=cfg.packing_samples, normalize=normalize)
        return cls(model.to(device).eval(), tokenizer, cfg.max_len)

    def encode(self, text: str) -> Encoded:
        """Token ids of a prompt with its response, as in training: padding removed, one end token at the end.

        A text that is too long loses tokens at the end that the tokenizer's ``truncation_side`` names (the right one
        unless the tokenizer says otherwise); the end token stays, since the score is read there.
        """
        return Encoded(*texts.end_scored(self.tokenizer, texts.encode_scored(self.tokenizer, text), self._max_len))

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One score for each sequence of token ids, computed together."""
        batch = pack(sequences, {}, range(len(sequences)))
        batch.require_known(vocabulary_size(self._model.config))
        return self._model(batch.to(self._device)).scores.tolist()
