"""The chunked head against a dense float64 reference, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from head_cases import check_fp32_head, dense
from torch import nn
from transformers import Gemma2Config, LlamaConfig

from openrlhf.models.head import (
    CHUNK_BYTES,
    HeadScaling,
    _logit_gradient,
    _statistics,
    chunk_rows,
    head_logprobs,
)

HIDDEN, VOCABULARY, ROWS = 16, 37, 11


def make_head(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "scaling", [HeadScaling(), HeadScaling(softcap=3.0), HeadScaling(scale=0.25), HeadScaling(0.5, 2.0)]
)
def test_values_and_gradients_equal_the_dense_path(
    rows: int, bias: bool, temperature: float, scaling: HeadScaling
) -> None:
    head = make_head(bias)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    upstream = torch.randn(ROWS, generator=generator), torch.randn(ROWS, generator=generator)

    logprobs, entropy = head_logprobs(head, hidden, targets, temperature, True, scaling, rows)
    assert entropy is not None
    (logprobs @ upstream[0] + entropy @ upstream[1]).backward()

    exact = [t.detach().double().requires_grad_() for t in (hidden, head.weight, *([head.bias] if bias else []))]
    ref = dense(exact[1], exact[2] if bias else None, exact[0], targets, temperature, scaling)
    (ref[0] @ upstream[0].double() + ref[1] @ upstream[1].double()).backward()

    torch.testing.assert_close(logprobs.double(), ref[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), ref[1], atol=1e-5, rtol=0)
    got = [hidden.grad, head.weight.grad, *([head.bias.grad] if bias else [])]
    for mine, theirs in zip(got, exact, strict=True):
        assert mine is not None and theirs.grad is not None
        torch.testing.assert_close(mine.double(), theirs.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.3653), (2.0, 0.5822)])
def test_entropy_is_that_of_the_policy_that_sampled(temperature: float, expected: float) -> None:
    """Logits 2 and 0 of two tokens: the temperature makes them 1 and 0."""
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    hidden, targets = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    logprobs, entropy = head_logprobs(head, hidden, targets, temperature, True, HeadScaling())
    assert entropy is not None and entropy.item() == pytest.approx(expected, abs=5e-5)
    assert logprobs.item() == pytest.approx(-math.log1p(math.exp(-2.0 / temperature)))


def test_entropy_is_not_computed_unless_asked_for() -> None:
    head = make_head(False)
    logprobs, entropy = head_logprobs(head, torch.randn(3, HIDDEN), torch.tensor([0, 1, 2]), 1.0, False, HeadScaling())
    assert entropy is None and logprobs.shape == (3,)


def test_plain_call_of_the_head_still_gives_logits() -> None:
    head = make_head(True)
    hidden = torch.randn(3, HIDDEN)
    before = head(hidden)
    head_logprobs(head, hidden, torch.tensor([0, 1, 2]), 1.0, False, HeadScaling())
    torch.testing.assert_close(head(hidden), before, atol=0, rtol=0)


def test_frozen_head_gets_no_gradient() -> None:
    head = make_head(True).requires_grad_(False)
    hidden = torch.randn(5, HIDDEN, requires_grad=True)
    logprobs, _ = head_logprobs(head, hidden, torch.arange(5), 1.0, False, HeadScaling(), 2)
    logprobs.sum().backward()
    assert head.weight.grad is None and head.bias.grad is None
    assert hidden.grad is not None and bool(hidden.grad.abs().sum() > 0)


def test_bf16_weight_gradient_does_not_lose_small_chunks() -> None:
    """With one row a chunk, adding in bf16 would drop most of 512 equal parts; the sum is made in float32."""
    head = make_head(False, torch.bfloat16)
    hidden = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(512, 1)
    targets = torch.zeros(512, dtype=torch.int64)
    logprobs, _ = head_logprobs(head, hidden, targets, 1.0, False, HeadScaling(), 1)
    logprobs.sum().backward()
    weight = head.weight.detach().double().requires_grad_()
    dense(weight, None, hidden.double(), targets, 1.0, HeadScaling())[0].sum().backward()
    assert head.weight.grad is not None and weight.grad is not None
    relative = (head.weight.grad.double() - weight.grad).norm() / weight.grad.norm()
    assert relative < 0.01


@pytest.mark.parametrize("bias", [False, True])
def test_logits_in_float32_are_not_rounded(bias: bool) -> None:
    check_fp32_head("cpu", bias)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_compiled_parts_leave_logits_alone(temperature: float) -> None:
    raw = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    targets, one = torch.arange(ROWS), torch.ones(ROWS)
    before = raw.clone()
    _, log_z, spread = torch.compile(_statistics, backend="aot_eager")(raw, targets, 2.0, 3.0, temperature, True)
    grad = torch.compile(_logit_gradient, backend="aot_eager")
    grad(raw, targets, log_z, spread, one, one, 2.0, 3.0, temperature, True, torch.float32)
    assert torch.equal(raw, before)


@pytest.mark.parametrize("vocabulary", [100, 32_000, 151_936, 256_000])
def test_chunk_stays_within_its_budget(vocabulary: int) -> None:
    assert chunk_rows(vocabulary, 2, fused=True) * vocabulary * 2 <= CHUNK_BYTES
    # without a kernel of its own there is the chunk in float32, and a second one while it is worked on
    assert chunk_rows(vocabulary, 2, fused=False) * vocabulary * 4 * 2 <= CHUNK_BYTES
    assert chunk_rows(1 << 40, 4, fused=True) == 1


def test_scaling_is_read_from_the_config() -> None:
    assert HeadScaling.from_config(LlamaConfig()) == HeadScaling()
    assert HeadScaling.from_config(Gemma2Config(final_logit_softcapping=30.0)) == HeadScaling(1.0, 30.0)
    granite = LlamaConfig()
    granite.logits_scaling = 8.0
    assert HeadScaling.from_config(granite) == HeadScaling(0.125, None)


def test_other_output_layers_are_refused() -> None:
    with pytest.raises(TypeError, match="Identity"):
        head_logprobs(nn.Identity(), torch.randn(1, 2), torch.tensor([0]), 1.0, False, HeadScaling())
