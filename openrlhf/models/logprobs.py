"""Token log-probabilities, values and scores of packed sequences.

The only place that knows that the logits at position ``t`` are about token ``t + 1``: everything that leaves this
module is indexed by the token it describes.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from openrlhf.batching import MicroBatch
from openrlhf.models.attention import sequence_bounds
from openrlhf.models.checks import base_model
from openrlhf.models.head import HeadScaling, head_logprobs
from openrlhf.models.loading import require_score_scale, score_scale, unwrap_hf
from openrlhf.models.sequence_parallel import ALONE, SequenceRanks, sequence_ranks


class TokenOutputs(NamedTuple):
    """What a policy says about each token of a micro-batch.

    Attributes:
        logprobs: float32 ``[N]``, log p(token | the tokens before it in its sequence); 0 for the first token of
            each sequence.
        entropy: float32 ``[N]``, entropy in nats of the distribution the token was drawn from; 0 likewise. None
            unless asked for.
        aux_loss: scalar router-balancing loss of a mixture of experts, else None.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


def _layout(batch: MicroBatch, packed: bool, ranks: SequenceRanks) -> tuple[dict[str, Any], Tensor | None]:
    """Model inputs, and for padded rows the ``[S, L]`` mask of real tokens."""
    if packed:
        inputs = {"input_ids": ranks.own(batch.input_ids)[None], "position_ids": ranks.own(batch.position_ids)[None]}
        shared = {"sequence_ranks": ranks} if ranks.size > 1 else {}
        return inputs | shared | sequence_bounds(ranks.filled_bounds(batch.cu_seqlens, batch.num_tokens)), None
    lengths = batch.lengths
    steps = torch.arange(int(lengths.max()), device=batch.input_ids.device)
    inside = steps < lengths[:, None]
    rows = torch.zeros(inside.shape, dtype=batch.input_ids.dtype, device=batch.input_ids.device)
    rows[inside] = batch.input_ids
    positions = steps.expand_as(rows)
    # Padding is on the right, where causal attention hides it from every real token; the mask is for models that
    # count tokens by it.
    return {"input_ids": rows, "position_ids": positions, "attention_mask": inside.long()}, inside


def _rows(tokens: Tensor, inside: Tensor | None) -> Tensor:
    """``[N, D]`` as one row ``[1, N, D]``, or as the padded rows ``[S, L, D]`` of :func:`_layout`."""
    if inside is None:
        return tokens[None]
    return tokens.new_zeros(*inside.shape, tokens.shape[1]).masked_scatter(inside[..., None], tokens)


class ScoreOutputs(NamedTuple):
    """What a reward model says about a micro-batch.

    Attributes:
        scores: float32 ``[S]``.
        aux_loss: as of :class:`TokenOutputs`.
    """

    scores: Tensor
    aux_loss: Tensor | None = None


class Backbone(nn.Module):
    """A transformers model whose hidden states are read in packed order."""

    def __init__(self, model: nn.Module, packing: bool = True, aux_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.packing = packing
        self.aux_loss = aux_loss and hasattr(self.config.get_text_config(), "router_aux_loss_coef")
        self.ranks = ALONE

    @property
    def hf_model(self) -> nn.Module:
        """The wrapped transformers (or peft) model."""
        return self.model

    @property
    def config(self) -> PretrainedConfig:
        """Configuration of the wrapped model."""
        return unwrap_hf(self.model).config

    def hidden_states(self, batch: MicroBatch) -> tuple[Tensor, Any]:
        """Last hidden states ``[N, H]`` (of this rank's slice, if there are others) and the base model's output."""
        inputs, inside = _layout(batch, self.packing, self.ranks)
        hf = unwrap_hf(self.model)
        base = base_model(hf)
        zero: Tensor | None = None
        vision = getattr(hf, "openrlhf_vision", None)
        if vision is not None:
            embeddings, positions, zero = vision(base, batch)
            inputs.pop("input_ids")
            inputs |= {
                "inputs_embeds": _rows(embeddings, inside),
                "position_ids": _rows(positions.T, inside).permute(2, 0, 1),
            }
        if self.aux_loss:
            inputs["output_router_logits"] = True
        outputs = base(**inputs, use_cache=False, return_dict=True)
        hidden = outputs.last_hidden_state
        hidden = hidden if zero is None else hidden + zero
        return (hidden[0] if inside is None else hidden[inside]), outputs

    def _router_loss(self, outputs: Any, batch: MicroBatch) -> Tensor | None:
        """Load-balancing loss of https://arxiv.org/abs/2101.03961, as each transformers model defines it."""
        if not self.aux_loss:
            return None
        hf = unwrap_hf(self.model)
        function = getattr(sys.modules[type(hf).__module__], "load_balancing_loss_func", None)
        if function is None or getattr(outputs, "router_logits", None) is None:
            return None
        text = self.config.get_text_config()
        experts = getattr(text, "num_experts", None) or text.num_local_experts
        mask = None if self.packing else _layout(batch, False, ALONE)[0]["attention_mask"]
        logits = tuple(self.ranks.gather(part, batch.num_tokens) for part in outputs.router_logits)
        return function(logits, experts, text.num_experts_per_tok, mask)

    def _about_next(self, batch: MicroBatch, values: Tensor) -> Tensor:
        """``[N]``: what this rank found at each of its tokens about the next, at the tokens it is about; else 0."""
        every = self.ranks.gather(values, batch.num_tokens)
        return torch.where(batch.position_ids > 0, torch.cat([every[:1], every[:-1]]), 0.0)


class PolicyModel(Backbone):
    """A causal language model that answers with log-probabilities of given tokens.

    Args:
        model: transformers (or peft) causal language model.
        packing: run sequences end to end in one row; otherwise as padded rows. The answer is the same.
        aux_loss: compute the router-balancing loss (mixtures of experts).
        fp32_head: logits in float32, whatever the model computes in.
    """

    def __init__(self, model: nn.Module, packing: bool = True, aux_loss: bool = False, fp32_head: bool = False) -> None:
        super().__init__(model, packing, aux_loss)
        self.fp32_head = fp32_head
        self.scaling = HeadScaling.from_config(self.config)

    def forward(self, batch: MicroBatch, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        """Log-probabilities of all tokens under ``softmax(logits / temperature)``.

        Args:
            batch: on the model's device.
            temperature: the one the tokens were sampled with.
            entropy: also compute the entropy of each token's distribution.
        """
        hidden, outputs = self.hidden_states(batch)
        first, width = self.ranks.span(batch.num_tokens)
        rows = (batch.position_ids[first + 1 : first + 1 + width] > 0).nonzero().squeeze(1)
        if rows.numel() == 0:  # the head must run all the same: it takes part in ZeRO-3's collectives
            rows = rows.new_zeros(1)
        targets = batch.input_ids[(rows + first + 1).clamp(max=batch.num_tokens - 1)]
        head = unwrap_hf(self.model).get_output_embeddings()
        found = head_logprobs(head, hidden[rows], targets, temperature, entropy, self.scaling, fp32=self.fp32_head)
        logprobs, spread = (
            None if part is None else self._about_next(batch, part.new_zeros(width).index_put((rows,), part))
            for part in found
        )
        assert logprobs is not None
        return TokenOutputs(logprobs, spread, self._router_loss(outputs, batch))


class ValueModel(Backbone):
    """A critic: the value of the state before each token.

    Args:
        normalize: its values are on the scale of a reward model's normalised scores, if it started from one: like
            those, with the mean and standard deviation stored in the model's config. Others have no scale yet.
    """

    def __init__(self, model: nn.Module, packing: bool = True, normalize: bool = False) -> None:
        super().__init__(model, packing)
        self.scale = score_scale(self.config) if normalize else None

    def forward(self, batch: MicroBatch) -> Tensor:
        """float32 ``[N]``: value at ``t`` is the head's output on the tokens before ``t``; 0 at sequence starts."""
        hidden, _ = self.hidden_states(batch)
        return self._about_next(batch, _scalar_head(self.model, hidden, self.scale))


class RewardModel(Backbone):
    """A reward model: one score for each sequence, read at its last token.

    Args:
        normalize: subtract the mean and divide by the standard deviation stored in the model's config.

    Raises:
        ModelLoadError: ``normalize``, and the config has none.
    """

    def __init__(self, model: nn.Module, packing: bool = True, normalize: bool = False, aux_loss: bool = False) -> None:
        super().__init__(model, packing, aux_loss)
        self.scale = require_score_scale(self.config) if normalize else None

    def forward(self, batch: MicroBatch) -> ScoreOutputs:
        """Scores, and the router loss if it was asked for."""
        hidden, outputs = self.hidden_states(batch)
        every = self.ranks.gather(_scalar_head(self.model, hidden, self.scale), batch.num_tokens)
        scores = every[batch.cu_seqlens[1:].long() - 1]
        return ScoreOutputs(scores, self._router_loss(outputs, batch))


def share_sequences(model: nn.Module, size: int) -> None:
    """Let ``size`` neighbouring ranks share each packed row in the models of this module; all ranks call it.

    Raises:
        PackingError: see :func:`sequence_ranks`.
    """
    for part in model.modules():
        if isinstance(part, Backbone):
            part.ranks = sequence_ranks(size, part.config)


def _scalar_head(model: nn.Module, hidden: Tensor, scale: tuple[float, float] | None) -> Tensor:
    """What the head says about each hidden state; minus the mean and by the standard deviation of ``scale``."""
    found = unwrap_hf(model).score(hidden).squeeze(-1)
    return found if scale is None else (found - scale[0]) / scale[1]
