"""The commands of docs/tools.md and docs/serve_rm.md parse, and their numbers are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from openrlhf.config import ServeRMConfig, parse_cli
from openrlhf.serve import app, metrics, server
from openrlhf.tools.post_process import DEFAULT_REWARD_TEMPLATE
from openrlhf.tools.verify import TOLERANCES

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOOLS = (DOCS / "tools.md").read_text(encoding="utf-8")
SERVE = (DOCS / "serve_rm.md").read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("openrlhf ")]


@pytest.mark.parametrize("words", commands(TOOLS) + commands(SERVE), ids=lambda words: " ".join(words[:3]))
def test_commands_parse(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("base", "adapter", "rm", "sft", "ckpt/checkpoints_sft"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("prompts.jsonl", "responses.jsonl"):
        (tmp_path / file).touch()
    command, rest = words[0], words[1:]
    if command == "convert":
        rest = ["--task", *rest]
    parse_cli(command, rest)


def test_there_are_commands_for_every_tool() -> None:
    assert {" ".join(words[:2]) if words[0] == "convert" else words[0] for words in commands(TOOLS + SERVE)} == {
        "lora_combiner",
        "convert zero2hf",
        "convert universal",
        "batch_inference",
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
