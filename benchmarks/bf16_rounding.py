"""How far bf16 alone moves the log-probs of a random model, by its shape: the model in bf16 against itself in float32.

    python benchmarks/bf16_rounding.py [--layers 8]

Engine and trainer both compute in bf16, so ``sync/logprob_diff_mean`` of equal weights has about this size. The tokens
are random; the vocabulary is cut to 32,000, and to ``--layers`` layers, so that it fits a small machine.
"""

from __future__ import annotations

import argparse

import torch
from make_model import KEY_VALUE_HEADS, SHAPES
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 32_000


@torch.no_grad()
def logprobs(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    """float32 ``[T - 1]``: of each token after the first of ``[1, T]``."""
    logits = model(ids).logits.float()[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def difference(size: str, layers: int) -> float:
    """Mean absolute difference over 128 random tokens."""
    torch.manual_seed(0)
    shape = {**SHAPES[size], "num_hidden_layers": layers, "num_key_value_heads": KEY_VALUE_HEADS[size]}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=size != "7b", **shape))
    model = model.to(torch.bfloat16).eval()
    ids = torch.randint(0, VOCABULARY, (1, 128))
    rounded = logprobs(model, ids)
    return float((rounded - logprobs(model.float(), ids)).abs().mean())


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    layers = parser.parse_args().layers
    print(f"torch {torch.__version__}, {layers} layers, {VOCABULARY} words")
    for size in SHAPES:
        print(f"{size}: mean |difference| of log-probs in bf16 and float32: {difference(size, layers):.4f}", flush=True)


if __name__ == "__main__":
    main()
