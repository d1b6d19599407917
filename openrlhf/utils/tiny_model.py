"""Make a tiny random model with a character tokenizer: for tests and for the demo, never downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

DEMO_CHARACTERS = "0123456789+-*/=()<>?.,:;!' abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
# A user's turn is followed by "=", an assistant's by the end token; nothing else is added.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n' }}"
    "{% else %}{{ message['content'] + '=' }}{% endif %}"
    "{% endfor %}"
)


def character_tokenizer(characters: str = DEMO_CHARACTERS) -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token a character; ids 0 to 3 are pad, bos, eos and unknown."""
    symbols = [PAD, BOS, EOS, UNK, *dict.fromkeys(characters)]
    inner = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token=UNK))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    path: str | Path,
    arch: str = "llama",
    characters: str = DEMO_CHARACTERS,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    tie: bool = False,
    **config: object,
) -> str:
    """Write a random causal language model and its tokenizer as a Hugging Face folder.

    Args:
        arch: a transformers ``model_type`` (``llama``, ``qwen2``, ``qwen3``, ...). transformers rebuilds the
            tokenizer of ``qwen2`` from its vocabulary, which loses the space character; the others keep it.
        characters: what the tokenizer knows, one token each.
        tie: share the weights of the embedding and the output layer.
        config: further entries of the model's configuration.

    Returns:
        ``str(path)``.
    """
    tokenizer = character_tokenizer(characters)
    settings: dict[str, object] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tie,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
        # Wider than the usual 0.02, so that a model this small says something and gradients are not tiny.
        "initializer_range": 0.1,
    }
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **{**settings, **config}))
    finally:
        torch.random.set_rng_state(state)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
