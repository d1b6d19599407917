"""What the chunked head must do on any device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openrlhf.models.head import HeadScaling, head_logprobs


def dense(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, targets: Tensor, temperature: float, scaling: HeadScaling
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from all logits at once."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scaling.scale
    if scaling.softcap is not None:
        logits = scaling.softcap * torch.tanh(logits / scaling.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def check_fp32_head(device: str, bias: bool) -> None:
    """All logits of a row have a part of some 100 in common, where bf16 has steps of 0.5; in float32 it cancels out."""
    torch.manual_seed(3)
    head = nn.Linear(16, 37, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight[:, 0] = 100
    hidden = torch.randn(11, 16).bfloat16()
    targets = torch.randint(0, 37, (11,))
    upstream = torch.randn(11), torch.randn(11)
    exact = [t.detach().double().requires_grad_() for t in (hidden, head.weight, *([head.bias] if bias else []))]
    ref = dense(exact[1], exact[2] if bias else None, exact[0], targets, 0.7, HeadScaling())
    (ref[0] @ upstream[0].double() + ref[1] @ upstream[1].double()).backward()

    head, hidden, targets = head.to(device), hidden.to(device).requires_grad_(), targets.to(device)
    rounded, _ = head_logprobs(head, hidden, targets, 0.7, True, HeadScaling(), 4)
    assert (rounded.cpu().double() - ref[0]).abs().mean() > 0.05
    logprobs, entropy = head_logprobs(head, hidden, targets, 0.7, True, HeadScaling(), 4, fp32=True)
    assert entropy is not None
    (logprobs @ upstream[0].to(device) + entropy @ upstream[1].to(device)).backward()
    torch.testing.assert_close(logprobs.cpu().double(), ref[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.cpu().double(), ref[1], atol=1e-4, rtol=0)
    # The logits' gradient is rounded, which the large weights make large: it is about 0 for what they all multiply.
    pairs = [(hidden.grad, exact[0].grad), (head.weight.grad, exact[1].grad)]
    pairs += [(head.bias.grad, exact[2].grad)] if bias else []
    for mine, theirs in [(a[..., 1:], b[..., 1:]) for a, b in pairs if a is not None and b is not None]:
        assert mine.dtype == torch.bfloat16
        assert (mine.cpu().double() - theirs).norm() < 0.01 * theirs.norm()
