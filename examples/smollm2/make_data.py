"""Sums of two one-digit numbers from reasoning-gym, as train.jsonl and held_out.jsonl with no problem in both.

Use: make smollm2-setup, then python examples/smollm2/make_data.py FOLDER [--rows N] [--held_out N] [--seed N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUFFIX = " Answer with only the final answer."


def make_rows(rows: int, held_out: int, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(training rows, held-out rows): {"prompt", "answer"}; training problems may repeat."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(TASK, seed=seed, size=20 * (rows + held_out), **SETTINGS)
    training: list[dict[str, str]] = []
    held: dict[str, dict[str, str]] = {}
    for item in data:
        row = {"prompt": item["question"] + SUFFIX, "answer": str(item["answer"])}
        if len(held) < held_out:
            held[row["prompt"]] = row
        elif row["prompt"] not in held and len(training) < rows:
            training.append(row)
    if len(training) < rows:
        raise SystemExit(f"the task has too few different problems for {rows} rows beside {held_out} held-out ones")
    return training, list(held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--held_out", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    training, held = make_rows(args.rows, args.held_out, args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", training), ("held_out", held)):
        path = args.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
