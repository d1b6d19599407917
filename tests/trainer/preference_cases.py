"""Run by conftest.py on one or two gloo ranks: many trainings in one start, metrics as JSON of rank 0.

Usage: preference_cases.py <folder>, with the rank in the environment
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import shlex
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import set_seed

from openrlhf import platform
from openrlhf.batching import MicroBatch
from openrlhf.config import parse_cli
from openrlhf.trainer import dpo, kto, reward_model, supervised
from openrlhf.utils.process import leave
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.distributed import World, init_distributed, shutdown

ROOT = Path(__file__).parents[2]
TRAIN: dict[str, Callable[[Any, World], None]] = {
    "train_rm": reward_model.train,
    "train_dpo": dpo.train,
    "train_kto": kto.train,
}
COMMON: dict[str, Any] = {
    "param_dtype": "fp32",
    "train_batch_size": 8,
    "micro_train_batch_size": 2,
    "max_len": 32,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
}
# Layouts of the same training: name, flags.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "packed": {"packing_samples": True},
        "zero3": {"zero_stage": 3, "micro_train_batch_size": 8},
        "zero0": {"zero_stage": 0, "micro_train_batch_size": 1},
        "cut": {"micro_train_batch_size": 8},
    },
    2: {
        "ranks2": {},
        "ranks2_packed_zero3": {"packing_samples": True, "zero_stage": 3, "gradient_checkpointing": True},
        "ranks2_micro1": {"micro_train_batch_size": 1},
        "ranks2_divided": {
            "packing_samples": True,
            "ring_attn_size": 2,
            "zero_stage": 3,
            "gradient_checkpointing": True,
        },
    },
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "train_rm": {
        "logexp": {"loss": "logexp"},
        "margin": {"margin_loss": True},
        "default_eval": {"eval_dataset": False, "max_steps": 1},
        "prefix": {"value_head_prefix": "value_head", "max_steps": 1},
        "named": {"value_head_prefix": "value_head", "max_steps": 1, "pretrain": "model"},
        "every2": {"logging_steps": 2},
        "long": {"max_epochs": 8, "train_batch_size": 16, "learning_rate": 3e-3},
    },
    "train_dpo": {
        "ipo": {"ipo": True},
        "smooth": {"label_smoothing": 0.2},
        "nll": {"nll_loss_coef": 0.5},
        "offload": {"ref_offload": True},
        "long": {"max_epochs": 4, "ref_pretrain": False},
    },
    "train_kto": {"weights": {"desirable_loss_weight": 2.0, "undesirable_loss_weight": 0.5}},
}


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions with an answer of good letters and one of bad letters, of uneven lengths."""
    rng = random.Random(seed)

    def word(letters: str, low: int, high: int) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))

    return [
        {
            "prompt": word("abcdefgh", 1, 6) + "?",
            "chosen": word("ijklab", 1, 7),
            "rejected": word("mnopab", 1, 7),
            "margin": round(rng.random(), 3),
        }
        for _ in range(count)
    ]


def labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """The same answers, one a row: two good ones, then a bad one."""
    return [
        {"input": row["prompt"], "output": row["chosen" if i % 3 else "rejected"], "label": int(i % 3 > 0)}
        for i, row in enumerate(pairs(count, seed))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@contextlib.contextmanager
def little_memory(tokens: int) -> Iterator[None]:
    """Passes over more tokens don't fit, of every engine."""
    call = TrainEngine.__call__

    def limited(engine: TrainEngine, batch: MicroBatch) -> Any:
        if batch.num_tokens > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return call(engine, batch)

    with unittest.mock.patch.object(TrainEngine, "__call__", limited):
        yield


class Cases:
    """The folder with models and data, and the metrics of each run."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.results: dict[str, Any] = {}
        if world.is_first and not (folder / "model").exists():
            make_tiny_model(folder / "model", "qwen3", tie=True)
            make_tiny_model(folder / "other", "qwen3", seed=1)
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            make_tiny_model(folder / "experts", "qwen3_moe", **experts)
            write(folder / "pairs.jsonl", pairs(24, 1))
            write(folder / "eval_pairs.jsonl", pairs(21, 2))
            write(folder / "five_pairs.jsonl", pairs(5, 3))
            write(folder / "one_pair.jsonl", pairs(1, 3))
            write(folder / "one_labelled.jsonl", labelled(1, 3))
            write(folder / "labelled.jsonl", labelled(24, 4))
            write(folder / "eval_labelled.jsonl", labelled(9, 5))
        dist.barrier()

    def flags(self, command: str, name: str, **changes: Any) -> list[str]:
        """The command line of a run."""
        values = {**COMMON, "save_path": f"{name}/model", "ckpt_path": f"{name}/ckpt", "pretrain": "model"}
        if command == "train_kto":
            values |= {"dataset": "labelled.jsonl", "eval_dataset": "eval_labelled.jsonl", "output_key": "output"}
            values |= {"input_template": "{}", "beta": 0.1}
        else:
            values |= {"dataset": "pairs.jsonl", "eval_dataset": "eval_pairs.jsonl", "prompt_key": "prompt"}
        if command == "train_rm":
            values["pretrain"] = "rm/start"
        if command == "train_dpo":
            values["ref_pretrain"] = "other"
        words: list[str] = []
        for flag, value in {**values, **changes}.items():
            if flag in ("pretrain", "ref_pretrain", "dataset", "eval_dataset", "save_path", "ckpt_path") and value:
                value = self.folder / value
            if value is True:
                words.append(f"--{flag}")
            elif value is not False:
                words += [f"--{flag}", str(value)]
        return words

    def run(self, command: str, name: str, **changes: Any) -> None:
        """Train, and note the metrics."""
        place = f"{command}/{name}"
        cfg = parse_cli(command, self.flags(command, place, **changes))
        set_seed(cfg.seed)
        with little_memory(40) if name == "cut" else contextlib.nullcontext():
            TRAIN[command](cfg, self.world)
        dist.barrier()
        lines = (self.folder / place / "ckpt" / "run" / "metrics.jsonl").read_text().splitlines()
        self.results[place] = [json.loads(line) for line in lines]


def one_rank(cases: Cases) -> None:
    """Everything that needs one rank only."""
    # a reward model with a head, so that references know all the weights a run starts from
    cases.run("train_rm", "../rm/make", pretrain="model", max_steps=1, learning_rate=1e-9)
    (cases.folder / "rm" / "make" / "model").rename(cases.folder / "rm" / "start")
    for command in TRAIN:
        cases.run(command, "base", save_steps=2, save_hf_ckpt=True)
        for name, flags in {**LAYOUTS[1], **VARIANTS[command]}.items():
            cases.run(command, name, **flags)
        cases.run(command, "resume", max_steps=2, save_steps=2)
        cases.run(command, "resume", load_checkpoint=True, eval_steps=1)
        for coefficient in (0.0, 0.5):
            flags = {"pretrain": "experts", "aux_loss_coef": coefficient, "max_steps": 1}
            cases.run(command, f"experts{coefficient}", **flags)
        cases.run(command, "lora", lora_rank=4, lora_dropout=0.1, zero_stage=3, gradient_checkpointing=True)
    for command in ("train_dpo", "train_kto"):
        cases.run(command, "again", save_steps=2)
        cases.run(command, "again", load_checkpoint=True)


def two_ranks(cases: Cases) -> None:
    """The same trainings spread out."""
    for command in TRAIN:
        for name, flags in LAYOUTS[2].items():
            cases.run(command, name, **flags)


def layouts_of_an_evaluation(cases: Cases) -> None:
    """Five pairs, two a micro-batch; or a single row."""
    for command in ("train_rm", "train_dpo"):
        flags = {"eval_dataset": "five_pairs.jsonl", "learning_rate": 1e-9, "max_steps": 1}
        cases.run(command, f"five{cases.world.size}", **flags)
    for command in TRAIN:  # one rank of two has nothing to evaluate
        source = "one_labelled.jsonl" if command == "train_kto" else "one_pair.jsonl"
        cases.run(command, f"one{cases.world.size}", eval_dataset=source, max_steps=1, zero_stage=3)


def documented() -> list[tuple[str, list[str]]]:
    """The commands of the two pages: name and arguments."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("reward_models.md", "dpo.md"))
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        words = shlex.split(block.replace("\\\n", " "))
        assert words[:2] == ["python", "-m"], block
        found.append((words[2].rpartition(".")[2], words[3:]))
    return found


def commands_of_the_docs(cases: Cases) -> None:
    """As a user runs them, in a folder that has what they name."""
    (cases.folder / "docs").mkdir()
    os.chdir(cases.folder / "docs")
    supervised.shutdown = lambda: None  # DeepSpeed can't join a second group in the same process
    make_tiny_model("sft")
    write(Path("pairs.jsonl"), pairs(64, 6))
    rows = [{"prompt": r["input"], "answer": r["output"], "good": bool(r["label"])} for r in labelled(64, 7)]
    write(Path("labelled.jsonl"), rows)
    wrong = {"train_rm": "--chosen_key", "train_dpo": "--prompt_key", "train_kto": "--label_key"}
    for command, words in documented():
        main_of = importlib.import_module(f"openrlhf.cli.{command}").main
        cases.results[f"docs/{command}"] = [main_of(words), main_of([*words, wrong[command], "missing"])]


def main() -> None:
    platform.prepare_process()
    world = init_distributed(timeout_s=400)
    rank, ranks, folder = world.rank, world.size, Path(sys.argv[1])
    cases = Cases(world, folder)
    (one_rank if ranks == 1 else two_ranks)(cases)
    layouts_of_an_evaluation(cases)
    if ranks == 1:
        commands_of_the_docs(cases)
    if rank == 0:
        (folder / f"results_{ranks}.json").write_text(json.dumps(cases.results))
    shutdown()


if __name__ == "__main__":
    main()
    leave(0)
