"""Small helpers of the configuration tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.config import parse_cli
from openrlhf.config.parser import Parsed, parse

# What each command can't do without; all names of models and data are hub ids, so nothing is looked up.
REQUIRED = {
    "train_sft": ["--pretrain", "org/model", "--dataset", "org/data"],
    "train_rm": ["--pretrain", "org/model", "--dataset", "org/data"],
    "train_dpo": ["--pretrain", "org/model", "--dataset", "org/data"],
    "train_kto": ["--pretrain", "org/model", "--dataset", "org/data", "--output_key", "answer"],
    "train_ppo_ray": [
        "--pretrain",
        "org/model",
        "--prompt_data",
        "org/data",
        "--remote_rm_url",
        "http://127.0.0.1:9/get_reward",
    ],
    "serve_rm": ["--reward_pretrain", "org/model"],
    "lora_combiner": ["--model_path", "org/base", "--lora_path", "org/lora", "--output_path", "./merged"],
    "convert": ["--task", "universal", "--ckpt_path", "."],
    "batch_inference": ["--eval_task", "rm", "--pretrain", "org/rm", "--dataset", "org/data", "--output_path", "out"],
    "reward": ["--task", "test", "--remote_rm_url", "reward.py", "--dataset", "org/data", "--label_key", "answer"],
}


def parsed(command: str, *flags: str) -> Parsed:
    """The result of the required flags and `flags`."""
    return parse(command, [*REQUIRED[command], *flags])


def violations(command: str, *flags: str) -> dict[str, str]:
    """Problem and fix by flag."""
    return {v.flag: f"{v.problem} -> {v.fix}" for v in parsed(command, *flags).violations}


def failing(capsys: pytest.CaptureFixture[str], command: str, *flags: str) -> str:
    """What `parse_cli` prints before it exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        parse_cli(command, [*REQUIRED[command], *flags])
    assert stop.value.code == 2
    return capsys.readouterr().err


def write(path: Path, text: str) -> str:
    """Write a file and return its path as text."""
    path.write_text(text, encoding="utf-8")
    return str(path)
