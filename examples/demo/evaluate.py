"""Accuracy of a Hugging Face folder on a file of problems, by greedy decoding with transformers alone.

Use: python examples/demo/evaluate.py MODEL_FOLDER PROBLEMS.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 4
BATCH = 256


@torch.no_grad()
def accuracy(model_folder: str | Path, problems: str | Path) -> float:
    """Share of the rows of `problems` ({"input", "answer"}) that the model answers exactly right."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in Path(problems).read_text(encoding="utf-8").splitlines()]
    right = 0
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        inputs = tokenizer([row["input"] for row in batch], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        responses = output[:, inputs["input_ids"].shape[1] :]
        for row, response in zip(batch, tokenizer.batch_decode(responses), strict=True):
            answer, ended, _ = response.partition(tokenizer.eos_token)
            right += bool(ended) and answer == row["answer"]
    return right / len(rows)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(f"{accuracy(sys.argv[1], sys.argv[2]):.3f}")
