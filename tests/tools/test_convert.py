"""Checkpoints of two ranks as Hugging Face folders, and resumed on one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import CASES
from safetensors.torch import load_file
from tool_helpers import commands, contents, page
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.cli.convert import main
from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = pytest.mark.e2e


def run_ranks(ranks: int, mode: str, folder: Path, *names: str) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    script = str(Path(__file__).with_name("checkpoint_cases.py"))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        [*command, script, mode, str(folder), *names], capture_output=True, text=True, timeout=400, env=environment
    )
    result = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert done.returncode == 0 and result, done.stderr[-3000:]
    return json.loads(result[0].removeprefix("RESULT"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    make_tiny_model(folder / "plain")
    make_tiny_model(folder / "tied", tie=True)
    (folder / "losses.json").write_text(json.dumps(run_ranks(2, "write", folder)))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_zero2hf_gives_what_training_saves(folder: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    case = CASES[name]
    model = {"tied": "tied"}.get(case.get("model", ""), "plain")
    flags = [
        "--ckpt_path",
        str(folder / name),
        "--pretrain",
        str(folder / model),
        "--output_path",
        str(tmp_path / "hf"),
    ]
    flags += ["--param_dtype", case.get("param_dtype", "fp32"), "--verify"]
    if name == "rm":
        flags += ["--is_rm", "--value_head_prefix", "value_head"]
    assert main(["zero2hf", *flags]) == 0
    what = "scores" if name == "rm" else "log-probs"
    assert f"largest difference of {what} on 4 fixed texts" in capsys.readouterr().out
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    saved = load_file(folder / f"{name}_hf" / "model.safetensors")
    assert ours.keys() == saved.keys() and ("value_head.weight" in ours) == (name == "rm")
    assert all(ours[key].dtype == saved[key].dtype and torch.equal(ours[key], saved[key]) for key in ours)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("1+1").input_ids == [5, 14, 5]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if name == "zero3_bf16" else "float32")
    if name != "rm":
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_universal_checkpoints_resume_on_another_number_of_ranks(folder: Path, capsys: Any) -> None:
    names = ("zero2", "zero3")
    for name in names:
        assert main(["universal", "--ckpt_path", str(folder / name), "--verify"]) == 0
        assert "weights: 0; resume" in capsys.readouterr().out
        assert (folder / name / "latest_universal").read_text() == "global_step3_uni"
        assert (folder / name / "latest").read_text() == "global_step3"
        assert not list((folder / name).glob(".*"))
    losses = json.loads((folder / "losses.json").read_text())
    resumed = run_ranks(1, "resume", folder, *names)
    for name in names:
        assert resumed[name] == pytest.approx(losses[name], rel=2e-6), name


def test_the_documented_commands_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "zero2" / "global_step3", tmp_path / "ckpt" / "checkpoints_sft" / "global_step3")
    (tmp_path / "ckpt" / "checkpoints_sft" / "latest").write_text("global_step3")
    shutil.copytree(folder / "tied", tmp_path / "base")
    lines = [words[1:] for words in commands(page("tools.md")) if words[0] == "convert"]
    assert [main(words) for words in lines] == [0, 0]
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "ckpt" / "checkpoints_sft" / "global_step3_uni").is_dir()


class TestRefused:
    def check(self, capsys: Any, words: list[str], *flags: str) -> None:
        assert main([*flags]) == 1
        error = capsys.readouterr().err
        assert all(word in error for word in words), error

    def test_no_checkpoint(self, tmp_path: Path, capsys: Any) -> None:
        self.check(capsys, ["no file `latest`", "none"], "universal", "--ckpt_path", str(tmp_path))

    def test_an_unknown_tag(self, folder: Path, capsys: Any) -> None:
        flags = ["universal", "--ckpt_path", str(folder / "zero2"), "--tag", "global_step9"]
        self.check(capsys, ["no checkpoint 'global_step9'", "global_step3"], *flags)

    def test_a_ppo_run(self, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "_actor").mkdir()
        self.check(capsys, ["PPO", f"{tmp_path}/_actor"], "universal", "--ckpt_path", str(tmp_path))

    def test_no_optimizer_files(self, folder: Path, capsys: Any) -> None:
        before = contents(folder / "zero0")
        self.check(capsys, ["--zero_stage 0"], "universal", "--ckpt_path", str(folder / "zero0"))
        assert contents(folder / "zero0") == before

    def test_another_model(self, folder: Path, tmp_path: Path, capsys: Any) -> None:
        other = make_tiny_model(tmp_path / "other", layers=3)
        output = str(tmp_path / "hf")
        flags = ["--ckpt_path", str(folder / "zero3" / "global_step3"), "--output_path", output, "--pretrain"]
        self.check(capsys, ["lacks 9 weights", "the model that the run started from"], "zero2hf", *flags, other)
        smaller = make_tiny_model(tmp_path / "smaller", hidden=32)
        self.check(capsys, ["[84, 32]", "the model that the run started from"], "zero2hf", *flags, smaller)
        self.check(
            capsys,
            ["lacks 1 weights", "has 1 others", "score.weight"],
            "zero2hf",
            *flags,
            str(folder / "plain"),
            "--is_rm",
        )
        assert not (tmp_path / "hf").exists()

    def test_a_damaged_checkpoint(self, folder: Path, tmp_path: Path, capsys: Any) -> None:
        shutil.copytree(folder / "zero2" / "global_step3", tmp_path / "ckpt" / "global_step3")
        (tmp_path / "ckpt" / "latest").write_text("global_step3")
        file = next((tmp_path / "ckpt" / "global_step3").glob("*_optim_states.pt"))
        file.write_bytes(file.read_bytes()[:1000])
        flags = ["--ckpt_path", str(tmp_path / "ckpt"), "--pretrain", str(folder / "tied")]
        self.check(capsys, ["can't be read"], "zero2hf", *flags, "--output_path", str(tmp_path / "hf"))
        self.check(capsys, ["can't convert"], "universal", "--ckpt_path", str(tmp_path / "ckpt"))
        assert sorted(p.name for p in (tmp_path / "ckpt").glob("*_uni*")) == []
        assert not (tmp_path / "ckpt" / "latest_universal").exists()

    def test_the_command_line(self, capsys: Any) -> None:
        with pytest.raises(SystemExit):
            main(["hf2megatron", "--ckpt_path", "."])
        assert "zero2hf" in capsys.readouterr().err
