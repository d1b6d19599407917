"""Make a tiny random model with a character tokenizer: for tests and for the demo, never downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

DEMO_CHARACTERS = "0123456789+-*/=()<>?.,:;!' abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n"
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
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
    _write(path, AutoModelForCausalLM, AutoConfig.for_model(arch, **{**settings, **config}), tokenizer, seed)
    return str(path)


def make_tiny_vision_model(path: str | Path, seed: int = 0) -> str:
    """Write a random Qwen2.5-VL, its tokenizer and its image processor as a Hugging Face folder.

    An image takes a token for every 28 by 28 pixels, 4 to 16 of them. Returns ``str(path)``.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    start, end, image, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    placeholder = "".join(IMAGE_TOKENS[index] for index in (0, 2, 1))
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        "{{ '" + placeholder + "' if part['type'] == 'image' else part['text'] }}"
        "{% endfor %}{% endif %}{{ eos_token if message['role'] == 'assistant' else '=' }}{% endfor %}"
    )
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    common = {"hidden_size": 64, "initializer_range": 0.1}
    text = {
        **{"vocab_size": len(tokenizer), "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "max_position_embeddings": 4096},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        **{"depth": 2, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64, "window_size": 56},
        "fullatt_block_indexes": [1],
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={**common, **text, **special},
        vision_config={**common, **vision},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )
    _write(path, AutoModelForImageTextToText, config, tokenizer, seed)
    Qwen2VLImageProcessorPil(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28).save_pretrained(path)
    return str(path)


def _write(
    path: str | Path, auto_class: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
    finally:
        torch.random.set_rng_state(state)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
