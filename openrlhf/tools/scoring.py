"""Scores of texts by a reward model, read at the end-of-sequence token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.batching import pack
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
        self._tokenizer = tokenizer
        self._max_len = max_len
        self._device = next(model.parameters()).device

    @classmethod
    def load(
        cls,
        path: str,
        settings: LoadSettings,
        *,
        head_prefix: str,
        max_len: int,
        normalize: bool,
        use_fast: bool,
        device: torch.device,
    ) -> RewardScorer:
        """Load a reward model for inference.

        Args:
            head_prefix: name of the head, if the model's config.json doesn't say.
            normalize: subtract the mean and divide by the std that the model's config.json has.

        Raises:
            ModelLoadError: it can't be read, has no head, or no mean and std although ``normalize`` asks for them.
        """
        tokenizer = load_tokenizer(path, use_fast=use_fast)
        hf_model = load_for_inference(path, settings, is_rm=True, head_prefix=head_prefix)
        model = RewardModel(hf_model, packing=settings.packing_samples, normalize=normalize)
        return cls(model.to(device).eval(), tokenizer, max_len)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._tokenizer

    def encode(self, text: str) -> Encoded:
        """Token ids of a prompt with its response, as in training: padding removed, one end token at the end.

        A text that is too long loses tokens at the end that the tokenizer's ``truncation_side`` names (the right one
        unless the tokenizer says otherwise); the end token stays, since the score is read there.
        """
        return Encoded(*texts.end_scored(self._tokenizer, texts.encode_scored(self._tokenizer, text), self._max_len))

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One score for each sequence of token ids, computed together."""
        batch = pack(sequences, {}, range(len(sequences)))
        batch.require_known(vocabulary_size(self._model.config))
        return self._model(batch.to(self._device)).scores.tolist()
