"""The commands of docs/tools.md and docs/serve_rm.md parse, and their numbers are those of the code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tool_helpers import commands, contents, make_reward_model, page, with_adapter

from openrlhf.cli import lora_combiner
from openrlhf.config import ServeRMConfig, parse_cli
from openrlhf.serve import app, metrics, server
from openrlhf.tools.post_process import DEFAULT_REWARD_TEMPLATE
from openrlhf.tools.verify import TOLERANCES
from openrlhf.utils.tiny_model import make_tiny_model

TOOLS = page("tools.md")
SERVE = page("serve_rm.md")


@pytest.mark.parametrize("words", commands(TOOLS) + commands(SERVE), ids=lambda words: " ".join(words[:3]))
def test_commands_parse(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "adapter", "rm", "sft", "hf", "ckpt/checkpoints_sft"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("prompts.jsonl", "responses.jsonl", "reward.py"):
        (tmp_path / file).touch()
    command, rest = words[0], words[1:]
    if command in ("convert", "reward"):
        rest = ["--task", *rest]
    parse_cli(command, rest)


def test_there_are_commands_for_every_tool() -> None:
    with_task = ("convert", "reward")
    assert {" ".join(words[:2]) if words[0] in with_task else words[0] for words in commands(TOOLS + SERVE)} == {
        "lora_combiner",
        "convert zero2hf",
        "convert universal",
        "convert hf2resume",
        "batch_inference",
        "reward test",
        "serve_rm",
    }


def test_numbers() -> None:
    defaults = ServeRMConfig()
    assert f"`--batch_size` ({server.DEFAULT_BATCH})" in SERVE
    assert f"`--queue_size` texts ({defaults.queue_size})" in SERVE
    assert f"`--max_body_mib` ({defaults.max_body_mib})" in SERVE
    assert f"took {app.REQUEST_TIMEOUT_S:g} s" in SERVE and f"within {server.GRACE_S} s" in SERVE
    assert server.TOKEN_VARIABLE in SERVE
    assert (
        f"({TOLERANCES['fp32']:g} in fp32, {TOLERANCES['fp16']} in fp16, {TOLERANCES['bf16']} in bf16)".replace(
            "0.0001", "1e-4"
        )
        in TOOLS
    )
    assert f"`{DEFAULT_REWARD_TEMPLATE}`" in TOOLS


def test_metrics() -> None:
    text = metrics.ServerMetrics(lambda: 0).text().decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    documented = {name for name in re.findall(r"`(rm_\w+)", SERVE)}
    assert {name for name in families if not name.endswith("_created")} == documented


def test_the_lora_combiner_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_adapter(make_tiny_model(tmp_path / "base"), tmp_path / "adapter")
    (words,) = [words[1:] for words in commands(TOOLS) if words[0] == "lora_combiner"]
    assert lora_combiner.main(words) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= contents(tmp_path / "merged").keys()


@pytest.mark.e2e
def test_the_batch_inference_commands_run(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "sft")
    make_reward_model(tmp_path / "rm")
    rows = [{"question": f"{n}+1"} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in commands(TOOLS):
        if words[0] == "batch_inference":
            done = subprocess.run(
                [sys.executable, "-m", "openrlhf.cli.batch_inference", *words[1:]],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=400,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
            assert done.returncode == 0, done.stderr[-3000:]
    responses = [json.loads(line) for line in (tmp_path / "responses.jsonl").read_text().splitlines()]
    assert [row["input"] for row in responses] == [row["question"] + "=" for row in rows for _ in range(4)]
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [pair["prompt"] for pair in pairs] == [row["question"] + "=" for row in rows]
    assert all(pair["chosen_reward"] > pair["rejected_reward"] for pair in pairs)
