"""Random-weight models of real shapes for throughput runs, with a byte-level tokenizer and a prompt file.

    python benchmarks/make_model.py 1.5b /tmp/model /tmp/prompts.jsonl

Random weights hardly ever sample the end token, so every response has the full length and every run the same work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3MoeConfig

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KEY_VALUE_HEADS = {"0.5b": 2, "1.5b": 2, "7b": 4}
EXPERTS: dict[str, dict[str, int]] = {
    # Layers as those of Qwen3-30B-A3B, with half as many experts: 3 billion weights, 1.1 of them at work.
    "moe_3b": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 32,
               "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8},
}  # fmt: skip
SIZES = (*SHAPES, *EXPERTS)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special ones, and fillers up to the vocabulary of the shapes."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for name in ("<eos>", "<bos>", "<pad>"):
        vocabulary[name] = len(vocabulary)
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"filler{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


def make_model(size: str, folder: Path) -> None:
    """Write model and tokenizer as a Hugging Face folder, unless they are there; safe in several processes at once."""
    if (folder / "config.json").is_file():
        return
    tokenizer = make_tokenizer()
    shared = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "tie_word_embeddings": size not in ("7b", *EXPERTS),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config: Qwen2Config | Qwen3MoeConfig
    if size in EXPERTS:
        config = Qwen3MoeConfig(**shared, **EXPERTS[size])
    else:
        config = Qwen2Config(**shared, num_key_value_heads=KEY_VALUE_HEADS[size], **SHAPES[size])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        own = Path(unfinished) / "model"
        model.save_pretrained(own)
        tokenizer.save_pretrained(own)
        try:
            own.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first
                raise


def make_prompts(path: Path, count: int, length: int) -> None:
    """``count`` different prompts of ``length`` bytes, and so tokens."""
    with path.open("w") as file:
        for i in range(count):
            text = f"question {i}: " + "what is the sum of the numbers in this list? " * (length // 40 + 1)
            file.write(json.dumps({"input": text[:length], "answer": str(i)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    options = parser.parse_args()
    make_model(options.size, options.folder)
    make_prompts(options.prompts, options.count, options.prompt_tokens)


if __name__ == "__main__":
    main()
