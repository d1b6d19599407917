"""Whether two models say the same: their answers on fixed texts, compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf.models.loading import unwrap_hf
from openrlhf.tools.errors import ToolError

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "12 + 30 = 42; 7 * 6 = 42; (1 + 2) * 14 = 42",
    "def square(x):\n    return x * x\n",
    "Question: which is heavier, a kilogram of iron or a kilogram of feathers?\nAnswer: neither.",
)
# What rounding the weights to a number format may change, with room.
TOLERANCES = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.3}
# Tokens less likely than this are left out: rounding moves their log-probs most, and they are never sampled.
_MIN_LOGPROB = math.log(1e-3)


@torch.inference_mode()
def answers(model: nn.Module, tokenizer: PreTrainedTokenizerBase, is_rm: bool) -> list[Tensor]:
    """For each fixed text the score (``[1]``), or the log-probs of the whole vocabulary at each position ``[T, V]``."""
    hf = unwrap_hf(model).eval()
    results = []
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
        if is_rm:
            hidden = getattr(hf, hf.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
            results.append(hf.score(hidden[:, -1]).float().flatten())
        else:
            logits = hf(input_ids=ids, use_cache=False).logits[0].float()
            results.append(torch.log_softmax(logits, -1))
    return results


def largest_difference(before: list[Tensor], after: list[Tensor], is_rm: bool) -> float:
    """Largest absolute difference of the scores, or of the log-probs of tokens with a probability above 0.001."""
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        difference = (a - b).abs()
        if not is_rm:
            difference = difference[a > _MIN_LOGPROB]
        worst = max(worst, float(difference.max()))
    return worst


def require_same(before: list[Tensor], after: list[Tensor], is_rm: bool, dtype: str) -> str:
    """A sentence with the largest difference.

    Raises:
        ToolError: it is larger than the number format explains.
    """
    worst = largest_difference(before, after, is_rm)
    what = "scores" if is_rm else "log-probs"
    told = f"largest difference of {what} on {len(TEXTS)} fixed texts: {worst:.3g}"
    if not worst <= TOLERANCES[dtype]:  # also for nan
        raise ToolError(
            f"{told}, more than the {TOLERANCES[dtype]:g} that {dtype} weights explain; nothing was written. Try "
            "--param_dtype fp32 to see whether it is rounding"
        )
    return told
