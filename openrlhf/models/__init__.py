"""Models: loading, packed attention, token log-probabilities, values and rewards."""

from openrlhf.models.loading import (
    ModelLoadError,
    ModelOptions,
    load_causal_lm,
    load_sequence_regression,
    load_tokenizer,
)
from openrlhf.models.logprobs import PolicyModel, RewardModel, TokenOutputs, ValueModel

__all__ = [
    "ModelLoadError",
    "ModelOptions",
    "PolicyModel",
    "RewardModel",
    "TokenOutputs",
    "ValueModel",
    "load_causal_lm",
    "load_sequence_regression",
    "load_tokenizer",
]
