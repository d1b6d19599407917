"""A tiny vision-language model for the tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from openrlhf.utils.tiny_model import character_tokenizer

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for one image in a prompt."""
_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '" + PLACE + "' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ eos_token if message['role'] == 'assistant' else '=' }}{% endfor %}"
)


def make_tiny_vision_model(path: str | Path) -> str:
    """Write a random Qwen2.5-VL, its tokenizer and its image processor as a Hugging Face folder.

    An image takes a token for every 28 by 28 pixels, 4 to 16 of them. Returns ``str(path)``.
    """
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _TOKENS})
    tokenizer.chat_template = _TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(_TOKENS)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 128}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    shape = {"hidden_size": 64, "initializer_range": 0.1}
    parts = {"depth": 2, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={"vocab_size": len(tokenizer), "rope_parameters": rotary, **shape, **heads, **special},
        vision_config={"window_size": 56, "fullatt_block_indexes": [1], **shape, **parts},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    Qwen2VLImageProcessorPil(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28).save_pretrained(path)
    return str(path)
