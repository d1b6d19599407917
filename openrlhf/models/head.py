"""The language-model head and log-softmax in one, a few rows at a time.

Logits of all tokens at once take ``N x vocabulary`` floats, more than the rest of the model. Here a chunk of rows is
turned into log-probabilities and dropped; the backward pass makes each chunk's logits again.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class HeadScaling:
    """What a model does to its logits after the projection: ``softcap * tanh(scale * x / softcap)``."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> HeadScaling:
        """Read the names that Cohere (logit_scale), Granite (logits_scaling) and Gemma (softcap) use."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        divisor = float(getattr(text, "logits_scaling", None) or 1.0)
        softcap = getattr(text, "final_logit_softcapping", None)
        return cls(scale / divisor, float(softcap) if softcap else None)


def chunk_rows(vocabulary: int, budget: int = CHUNK_BYTES) -> int:
    """Rows whose float32 logits fit into ``budget`` bytes; at least one."""
    return max(1, budget // (4 * vocabulary))


def head_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    scaling: HeadScaling,
    rows: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` (and entropies) from the hidden states that predict them.

    Args:
        head: the model's output projection (``nn.Linear``). It is called as a module, so that ZeRO-3 gathers its
            weight before and releases it after.
        hidden: ``[M, H]``.
        targets: int64 ``[M]``.
        rows: rows of logits at a time; None = as many as fit into 256 MiB.

    Returns:
        float32 ``[M]`` and float32 ``[M]`` or None.
    """
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the output layer is a {type(head).__name__}; log-probs need a linear one")
    if not hasattr(head, "plain_forward"):
        object.__setattr__(head, "plain_forward", head.forward)
        head.forward = types.MethodType(_forward_or_logprobs, head)  # type: ignore[method-assign]
    request = _Request(targets, temperature, entropy, scaling, rows or chunk_rows(head.out_features))
    logprobs, spread = head(hidden, request)
    return logprobs, (spread if entropy else None)


@dataclass(frozen=True)
class _Request:
    targets: Tensor
    temperature: float
    entropy: bool
    scaling: HeadScaling
    rows: int


def _forward_or_logprobs(self: Any, hidden: Tensor, request: _Request | None = None) -> Any:
    """``forward`` of a head: logits as always, or log-probs when asked. Runs inside the module's ZeRO-3 hooks."""
    if request is None:
        return self.plain_forward(hidden)
    return _ChunkedLogprobs.apply(hidden, self.weight, self.bias, request)


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: _Request) -> Tensor:
    """float32 ``[rows, V]`` logits divided by the temperature."""
    logits = F.linear(hidden, weight, bias).float()
    scaling = request.scaling
    if scaling.scale != 1.0:
        logits = logits.mul_(scaling.scale)
    if scaling.softcap is not None:
        logits = logits.div_(scaling.softcap).tanh_().mul_(scaling.softcap)
    if request.temperature != 1.0:
        logits = logits.div_(request.temperature)
    return logits


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: _Request
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty_like(logprobs)
        spread = torch.zeros_like(logprobs)
        for start in range(0, count, request.rows):
            part = slice(start, start + request.rows)
            logits = _scaled_logits(hidden[part], weight, bias, request)
            log_z = torch.logsumexp(logits, dim=-1)
            normaliser[part] = log_z
            logprobs[part] = logits.gather(1, request.targets[part, None]).squeeze(1) - log_z
            if request.entropy:
                # H = log Z - sum p x; p x is 0 where p is 0, also for x = -inf
                probs = (logits - log_z[:, None]).exp_()
                spread[part] = log_z - torch.where(probs > 0, probs * logits, 0.0).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, normaliser, spread)
        ctx.request = request
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_spread: Tensor) -> Any:
        hidden, weight, bias, normaliser, spread = ctx.saved_tensors
        request: _Request = ctx.request
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # many chunks are added up: in float32, whatever the weights are
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for start in range(0, hidden.shape[0], request.rows):
            part = slice(start, start + request.rows)
            grad = _logit_gradient(ctx, part, grad_logprobs[part], grad_spread[part], spread[part], normaliser[part])
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _logit_gradient(
    ctx: Any, part: slice, grad_logprobs: Tensor, grad_spread: Tensor, spread: Tensor, normaliser: Tensor
) -> Tensor:
    """Gradient of one chunk with respect to the raw output of the projection, float32 ``[rows, V]``.

    With x the scaled logits and p their softmax: d logp(target) / dx = onehot - p and
    dH / dx = -p (log p + H).
    """
    hidden, weight, bias = ctx.saved_tensors[:3]
    request: _Request = ctx.request
    logits = _scaled_logits(hidden[part], weight, bias, request)
    squash = None
    if request.scaling.softcap is not None:
        # d(cap tanh(y / cap)) / dy = 1 - tanh(y / cap)^2
        squash = 1.0 - (logits * (request.temperature / request.scaling.softcap)).square()
    log_probs = logits.sub_(normaliser[:, None])
    if request.entropy:
        probs = log_probs.exp()
        weights = torch.where(probs > 0, log_probs + spread[:, None], 0.0).mul_(-grad_spread[:, None])
        grad = probs.mul_(weights.sub_(grad_logprobs[:, None]))
    else:
        grad = log_probs.exp_().mul_(-grad_logprobs[:, None])
    grad.scatter_add_(1, request.targets[part, None], grad_logprobs[:, None])
    if squash is not None:
        grad.mul_(squash)
    factor = request.scaling.scale / request.temperature
    return grad.mul_(factor) if factor != 1.0 else grad
