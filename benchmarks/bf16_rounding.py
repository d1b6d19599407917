"""How far bf16 alone moves the log-probs of a random model, by its shape: the model in bf16 against itself in float32.

    python benchmarks/bf16_rounding.py [--layers 8] [--common 0 16]

Engine and trainer both compute in bf16, so ``sync/logprob_diff_mean`` of equal weights has about this size. The tokens
are random; the vocabulary is cut to 32,000, and to ``--layers`` layers, so that it fits a small machine. Each row adds
the same number to all logits, which moves no probability but makes bf16's steps larger: with and without
``--fp32_lm_head``, which does not round logits.
"""

from __future__ import annotations

import argparse

import torch
from make_model import KEY_VALUE_HEADS, SHAPES
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 32_000


def logits(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    """float32 ``[T - 1, V]``: those about each token after the first of ``[1, T]``, not rounded."""
    hidden = model.model(ids).last_hidden_state[0, :-1]
    return hidden.float() @ model.lm_head.weight.float().T


def logprobs(raw: Tensor, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """float32 ``[T - 1]``: of the tokens, with logits rounded to a number format."""
    return raw.to(dtype).float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def differences(size: str, layers: int, common: list[float]) -> list[tuple[float, float]]:
    """Mean absolute difference over 128 random tokens for each common part: logits in bf16, and in float32."""
    torch.manual_seed(0)
    shape = {**SHAPES[size], "num_hidden_layers": layers, "num_key_value_heads": KEY_VALUE_HEADS[size]}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=size != "7b", **shape))
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(0, VOCABULARY, (1, 128))
    rounded = logits(model, ids)
    exact = logprobs(logits(model.float(), ids), ids)
    return [
        (
            float((logprobs(rounded + part, ids, torch.bfloat16) - exact).abs().mean()),
            float((logprobs(rounded + part, ids) - exact).abs().mean()),
        )
        for part in common
    ]


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--common", type=float, nargs="+", default=[0.0, 16.0])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.layers} layers, {VOCABULARY} words")
    print("mean |difference| of log-probs in bf16 and float32: with logits in bf16, and in float32")
    for size in SHAPES:
        found = differences(size, options.layers, options.common)
        for part, (bf16, fp32) in zip(options.common, found, strict=True):
            print(f"{size:>8}, {part:4g} in all logits: {bf16:.4f} {fp32:.4f}", flush=True)


if __name__ == "__main__":
    main()
