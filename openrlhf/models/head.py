"""The language-model head and log-softmax in one, a few rows at a time; and the scalar head of critics.

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

from openrlhf.models.fused import can_fuse, fuse

CHUNK_BYTES = 256 << 20
"""Most bytes of one chunk's logits; with their gradient, twice as much is alive at a time."""


class ScalarHead(nn.Linear):
    """A linear head of values or scores that multiplies in float32, whatever its weight and its input are.

    In bf16 a score of 10 would be a multiple of 1/16, and the difference of two good answers often 0.
    """

    @classmethod
    def of(cls, head: nn.Linear) -> ScalarHead:
        """A head with the parameters of another linear layer."""
        new = cls(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        new.weight, new.bias = head.weight, head.bias
        return new

    def forward(self, hidden: Tensor) -> Tensor:
        """float32, of the shape that a linear layer gives."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)


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


def chunk_rows(vocabulary: int, item_bytes: int, fused: bool, budget: int = CHUNK_BYTES) -> int:
    """Rows of logits to make at a time; at least one.

    Args:
        item_bytes: size of a raw logit.
        fused: whether a kernel reads raw logits and writes results; without, there are copies in float32.
    """
    return max(1, budget // (vocabulary * (item_bytes if fused else 2 * max(item_bytes, 4))))


def head_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    scaling: HeadScaling,
    rows: int | None = None,
    fp32: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of ``targets`` (and entropies) from the hidden states that predict them.

    Args:
        head: the model's output projection (``nn.Linear``). It is called as a module, so that ZeRO-3 gathers its
            weight before and releases it after.
        hidden: ``[M, H]``.
        targets: int64 ``[M]``.
        rows: rows of logits at a time; None = as many as fit into 256 MiB.
        fp32: don't round logits to the number format of the weight (https://arxiv.org/abs/2506.13585 and 2510.13786).

    Returns:
        float32 ``[M]`` and float32 ``[M]`` or None.
    """
    if not isinstance(head, nn.Linear):
        raise TypeError(f"the output layer is a {type(head).__name__}; log-probs need a linear one")
    if not hasattr(head, "plain_forward"):
        object.__setattr__(head, "plain_forward", head.forward)
        head.forward = types.MethodType(_forward_or_logprobs, head)  # type: ignore[method-assign]
    fused = can_fuse(hidden.device)
    rows = rows or chunk_rows(head.out_features, 4 if fp32 else hidden.element_size(), fused)
    request = _Request(targets, temperature, entropy, scaling, rows, fused, fp32)
    logprobs, spread = head(hidden, request)
    return logprobs, (spread if entropy else None)


@dataclass(frozen=True)
class _Request:
    targets: Tensor
    temperature: float
    entropy: bool
    scaling: HeadScaling
    rows: int
    fused: bool
    fp32: bool


def _forward_or_logprobs(self: Any, hidden: Tensor, request: _Request | None = None) -> Any:
    """``forward`` of a head: logits as always, or log-probs when asked. Runs inside the module's ZeRO-3 hooks."""
    if request is None:
        return self.plain_forward(hidden)
    return _ChunkedLogprobs.apply(hidden, self.weight, self.bias, request)


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, fp32: bool) -> Tensor:
    """Raw logits ``[rows, V]``, in the number format of the weight or in float32.

    The factors are the same either way, and so are their products, which float32 holds; only the sum is rounded or not.
    A GPU multiplies in the weight's format and writes float32; a CPU has no such product, and multiplies in float32.
    """
    if not fp32 or weight.dtype == torch.float32:
        return F.linear(hidden, weight, bias)
    if weight.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return logits if bias is None else logits.add_(bias)
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _scaled(raw: Tensor, scale: float, softcap: float | None, temperature: float) -> Tensor:
    """float32 ``[rows, V]`` logits divided by the temperature; may change float32 input, except when compiled."""
    # A kernel has what it changes in registers; changed input it would have to write back.
    logits = raw.to(torch.float32, copy=torch.compiler.is_compiling())
    if scale != 1.0:
        logits = logits.mul_(scale)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits


def _statistics(
    raw: Tensor, targets: Tensor, scale: float, softcap: float | None, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: log-prob of the target, log of the normaliser, entropy (or zeros)."""
    logits = _scaled(raw, scale, softcap, temperature)
    log_z = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - log_z
    if not entropy:
        return logprobs, log_z, torch.zeros_like(log_z)
    # Not log Z - sum p x: there what sum p lacks of 1 counts as often as logits are large.
    log_probs = logits.sub_(log_z[:, None])
    probs = log_probs.exp()
    return logprobs, log_z, -torch.where(probs > 0, probs * log_probs, 0.0).sum(-1)  # 0 where p is, also for -inf


def _logit_gradient(
    raw: Tensor,
    targets: Tensor,
    log_z: Tensor,
    spread: Tensor,
    grad_logprobs: Tensor,
    grad_spread: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    entropy: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient with respect to the raw output of the projection, ``[rows, V]`` of ``dtype``.

    With x the scaled logits and p their softmax: d logp(target) / dx = onehot - p and
    dH / dx = -p (log p + H).
    """
    logits = _scaled(raw, scale, softcap, temperature)
    squash = None
    if softcap is not None:
        # d(cap tanh(y / cap)) / dy = 1 - tanh(y / cap)^2
        squash = 1.0 - (logits * (temperature / softcap)).square()
    log_probs = logits.sub_(log_z[:, None])
    if entropy:
        probs = log_probs.exp()
        weights = torch.where(probs > 0, log_probs + spread[:, None], 0.0).mul_(-grad_spread[:, None])
        grad = probs.mul_(weights.sub_(grad_logprobs[:, None]))
    else:
        grad = log_probs.exp_().mul_(-grad_logprobs[:, None])
    columns = torch.arange(raw.shape[1], device=raw.device)
    grad = torch.where(columns == targets[:, None], grad + grad_logprobs[:, None], grad)
    if squash is not None:
        grad = grad.mul_(squash)
    factor = scale / temperature
    return (grad.mul_(factor) if factor != 1.0 else grad).to(dtype)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: _Request
    ) -> tuple[Tensor, Tensor]:
        statistics = fuse(_statistics) if request.fused else _statistics
        scaling = request.scaling
        parts = []
        for start in range(0, hidden.shape[0], request.rows):
            part = slice(start, start + request.rows)
            raw = _project(hidden[part], weight, bias, request.fp32)
            parts.append(
                statistics(
                    raw, request.targets[part], scaling.scale, scaling.softcap, request.temperature, request.entropy
                )
            )
        logprobs, log_z, spread = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, log_z, spread)
        ctx.request = request
        return logprobs, spread

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_spread: Tensor) -> Any:
        hidden, weight, bias, log_z, spread = ctx.saved_tensors
        request: _Request = ctx.request
        scaling = request.scaling
        gradient = fuse(_logit_gradient) if request.fused else _logit_gradient
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # many chunks are added up: in float32, whatever the weights are
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        for start in range(0, hidden.shape[0], request.rows):
            part = slice(start, start + request.rows)
            grad = gradient(
                _project(hidden[part], weight, bias, request.fp32),
                request.targets[part],
                log_z[part],
                spread[part],
                grad_logprobs[part],
                grad_spread[part],
                scaling.scale,
                scaling.softcap,
                request.temperature,
                request.entropy,
                weight.dtype,
            )
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            del grad  # or it would still be there while the next chunk's logits and gradient are made
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
        )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with a float32 sum."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
