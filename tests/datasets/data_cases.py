"""Tokenizers and files for the tests of data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m['role'][0] + ']' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[a]' }}{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def letters(
    template: str | None = CHATML,
    eos: str = "<|im_end|>",
    adds_bos: bool = False,
    special: Sequence[str] = (),
    bos: str = "<bos>",
) -> PreTrainedTokenizerFast:
    """One token a character, special tokens whole; ``adds_bos`` makes the tokenizer put <bos> first by itself."""
    symbols = list(dict.fromkeys([*SPECIAL, *special, *map(chr, range(32, 127)), "\n"]))
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token=bos, eos_token=eos, unk_token="<unk>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    tokenizer.chat_template = template
    return tokenizer


def merging(merge: str) -> PreTrainedTokenizerFast:
    """As :func:`letters`, but the given pair of characters is one token."""
    symbols = [*SPECIAL, *map(chr, range(32, 127)), "\n", merge]
    inner = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, [(merge[0], merge[1])]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
