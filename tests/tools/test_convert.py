"""Checkpoints of two ranks as Hugging Face folders and resumed on one rank, and of Hugging Face folders resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import CASES, build, step
from ports import unused_port
from safetensors.torch import load_file
from tool_helpers import commands, contents, make_reward_model, page
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.cli import train_rm, train_sft
from openrlhf.cli.convert import main
from openrlhf.trainer import supervised
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.checkpoint_files import CheckpointError
from openrlhf.workers.distributed import init_distributed, shutdown

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
def one_rank() -> Iterator[None]:
    """A process group for all that hf2resume and train_sft do in this process."""
    with pytest.MonkeyPatch.context() as patch:
        places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
        for name, value in {**places, **address, "OPENRLHF_DEVICE": "cpu"}.items():
            patch.setenv(name, value)
        patch.setattr(supervised, "shutdown", lambda: None)
        init_distributed()
        yield
        shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    make_tiny_model(folder / "plain")
    make_tiny_model(folder / "tied", tie=True)
    make_tiny_model(folder / "other", seed=1)
    from_hf = ["--pretrain", str(folder / "plain"), "--ckpt_path", str(folder / "from_hf"), "--zero_stage", "3"]
    assert main(["hf2resume", *from_hf]) == 0
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
    told = capsys.readouterr().out
    assert f"largest difference of {what} on 4 fixed texts" in told
    assert f"tokenizer and chat template of {folder / model}" in told and ("no mean and std" in told) == (name == "rm")
    ours = load_file(tmp_path / "hf" / "model.safetensors")
    saved = load_file(folder / f"{name}_hf" / "model.safetensors")
    assert ours.keys() == saved.keys() and ("value_head.weight" in ours) == (name == "rm")
    assert all(ours[key].dtype == saved[key].dtype and torch.equal(ours[key], saved[key]) for key in ours)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("1+1").input_ids == [5, 14, 5]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if name == "zero3_bf16" else "float32")
    if name != "rm":
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


def test_a_checkpoint_of_train_rm_becomes_the_model_that_it_saved(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """With the chat template of the run, and the scale of its scores where they were measured (the last step)."""
    rows = [json.dumps({"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "0"}) for a in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    words = ["--pretrain", str(folder / "plain"), "--dataset", str(tmp_path / "pairs.jsonl"), "--prompt_key", "prompt"]
    words += ["--train_batch_size", "2", "--micro_train_batch_size", "2", "--param_dtype", "fp32", "--save_steps", "1"]
    words += ["--save_path", str(tmp_path / "model"), "--ckpt_path", str(tmp_path / "ckpt"), "--max_epochs", "1"]
    words += ["--eval_steps", "99", "--value_head_prefix", "value"]
    assert train_rm.main([*words, "--tokenizer_chat_template", "{{ messages[0].content }}!"]) == 0
    flags = ["--ckpt_path", str(tmp_path / "ckpt"), "--pretrain", str(folder / "plain"), "--is_rm"]
    assert main(["zero2hf", *flags, "--param_dtype", "fp32", "--output_path", str(tmp_path / "hf")]) == 0
    assert "and the mean and std" in capsys.readouterr().out
    ours, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "model"))
    assert "value.weight" in ours and ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)
    texts = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in texts:
        assert (tmp_path / "hf" / name).read_text() == (tmp_path / "model" / name).read_text(), name
    flags += ["--tag", "global_step1", "--param_dtype", "fp32", "--output_path", str(tmp_path / "before")]
    assert main(["zero2hf", *flags]) == 0
    assert "and no mean and std" in capsys.readouterr().out


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
        for changes, word in (
            ({"zero_stage": 5 - CASES[name]["zero_stage"]}, "can't read it; take --zero_stage"),
            ({"lora_rank": 4}, "weights that this run trains .*lora_A.* Resume with the model, --lora_rank"),
            ({"model": "rm"}, "lacks 1 of the .*score.weight.* Resume with the model"),
        ):
            with pytest.raises(CheckpointError, match=word):
                build(folder, name, use_ds_universal_ckpt=True, **changes).load_checkpoint(folder / name)


def test_adapters_resume_from_the_universal_format(tmp_path: Path, one_rank: None) -> None:
    make_tiny_model(tmp_path / "plain")

    def adapters(**changes: Any) -> Any:
        return build(tmp_path, "zero3", zero_stage=2, lora_rank=4, **changes)

    engine, world = adapters(), init_distributed()
    step(engine, world, 0)
    engine.save_checkpoint(tmp_path / "ckpt", "global_step1", {})
    after = [step(engine, world, seed) for seed in (1, 2)]
    assert main(["universal", "--ckpt_path", str(tmp_path / "ckpt")]) == 0
    with pytest.raises(CheckpointError, match="is damaged or not complete.*FileNotFoundError.*optim_states"):
        (file,) = (tmp_path / "ckpt/global_step1").glob("*optim_states.pt")
        file.unlink()
        adapters().load_checkpoint(tmp_path / "ckpt")
    resumed = adapters(use_ds_universal_ckpt=True)
    assert resumed.load_checkpoint(tmp_path / "ckpt") == {}
    assert [step(resumed, world, seed) for seed in (1, 2)] == after


class TestHf2Resume:
    def train(self, folder: Path, root: Path, model: str, *flags: str) -> dict[int, tuple[float, float]]:
        """Loss and rate of each step of train_sft; the rates are too small to change a weight."""
        rows = [json.dumps({"input": f"{a}+{b}=", "output": str(a + b)}) for a in range(4) for b in range(3)]
        (root / "rows.jsonl").write_text("\n".join(rows))
        words = ["--pretrain", str(folder / model), "--dataset", str(root / "rows.jsonl"), "--output_key", "output"]
        words += ["--input_template", "{}", "--train_batch_size", "4", "--micro_train_batch_size", "2"]
        words += ["--max_len", "32", "--learning_rate", "1e-12", "--max_epochs", "1", "--param_dtype", "fp32"]
        words += ["--save_path", str(root / "model"), "--ckpt_path", str(root / "ckpt"), "--run_dir", str(root / "run")]
        assert train_sft.main([*words, *flags]) == 0
        lines = [json.loads(line) for line in (root / "run" / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: (line["gpt_loss"], line["lr"]) for line in lines if line["kind"] == "train"}

    @pytest.mark.parametrize("done", [0, 2])
    def test_training_goes_on_with_its_weights(self, folder: Path, tmp_path: Path, capsys: Any, done: int) -> None:
        (tmp_path / "started").mkdir()
        started = self.train(folder, tmp_path / "started", "plain")
        assert sorted(started) == [1, 2, 3] and len(set(started.values())) == 3
        flags = ["--ckpt_path", str(tmp_path / "ckpt"), "--param_dtype", "fp32", "--verify"]
        flags += ["--resume_step", str(done), "--consumed_samples", str(4 * done)] if done else []
        assert main(["hf2resume", "--pretrain", str(folder / "plain"), *flags]) == 0
        assert "weights: 0; resume" in capsys.readouterr().out
        assert sorted(p.name for p in (tmp_path / "ckpt").iterdir()) == [f"global_step{done}_uni", "latest_universal"]
        resumed = self.train(folder, tmp_path, "other", "--load_checkpoint", "--use_ds_universal_ckpt")
        assert resumed == {step: values for step, values in started.items() if step > done}

    def test_two_ranks_with_zero3_train_on_from_it(self, folder: Path) -> None:
        losses = json.loads((folder / "losses.json").read_text())
        assert losses["from_hf"] == losses["started"]

    def test_a_reward_model(self, tmp_path: Path, capsys: Any) -> None:
        model = make_reward_model(tmp_path / "rm", "value_head")
        flags = ["hf2resume", "--pretrain", model, "--ckpt_path", str(tmp_path / "ckpt"), "--is_rm", "--verify"]
        assert main(flags) == 0
        assert "weights: 0; resume" in capsys.readouterr().out
        head = torch.load(tmp_path / "ckpt/global_step0_uni/zero/model.score.weight/fp32.pt", weights_only=False)
        stored = load_file(tmp_path / "rm" / "model.safetensors")["value_head.weight"]
        assert torch.equal(head["param"].flatten(), stored.bfloat16().float().flatten())

    def test_refused(self, folder: Path, tmp_path: Path, capsys: Any) -> None:
        def refusal(ckpt: Path, *flags: str, model: str = "plain") -> str:
            assert main(["hf2resume", "--pretrain", str(folder / model), "--ckpt_path", str(ckpt), *flags]) == 1
            return capsys.readouterr().err

        before = contents(folder / "from_hf")
        assert "global_step0_uni in universal format already" in refusal(folder / "from_hf", "--resume_step", "5")
        assert contents(folder / "from_hf") == before
        assert "start train_ppo_ray with --pretrain" in refusal(tmp_path / "_actor")
        assert "no weight score.weight" in refusal(tmp_path / "ckpt", "--is_rm")
        (tmp_path / "empty").mkdir()
        assert "config.json" in refusal(tmp_path / "ckpt", model=str(tmp_path / "empty"))
        for flags, word in (
            (["--zero_stage", "0", "--param_dtype", "fp32"], "use 1, 2 or 3"),
            (["--param_dtype", "fp16"], "use bf16"),
        ):
            with pytest.raises(SystemExit):
                refusal(tmp_path / "ckpt", *flags)
            assert word in capsys.readouterr().err
        assert not (tmp_path / "ckpt").exists() and not (tmp_path / "_actor").exists()


def test_the_documented_commands_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "zero2" / "global_step3", tmp_path / "ckpt" / "checkpoints_sft" / "global_step3")
    (tmp_path / "ckpt" / "checkpoints_sft" / "latest").write_text("global_step3")
    shutil.copytree(folder / "tied", tmp_path / "base")
    lines = [words[1:] for words in commands(page("tools.md")) if words[0] == "convert"]
    assert [main(words) for words in lines] == [0, 0, 0]
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "ckpt" / "checkpoints_sft" / "global_step3_uni").is_dir()
    assert (tmp_path / "ckpt" / "from_hf" / "latest_universal").read_text() == "global_step100_uni"


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
