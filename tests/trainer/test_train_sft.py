"""train_sft as a user runs it: whole processes on a tiny model, one and two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.utils.process import free_port
from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = pytest.mark.e2e

DEADLINE_S = 300


class Bench:
    """A folder with a model and data, and a way to run the command on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model", "qwen3", tie=True)
        rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(5, 9) for b in range(7, 15)]
        self.data = self.write("train.jsonl", rows)
        self.eval_data = self.write("eval.jsonl", [{"input": f"{a}+1=", "output": str(a + 1)} for a in range(0, 50, 7)])

    def write(self, name: str, rows: list[dict[str, Any]]) -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def arguments(self, name: str, **flags: Any) -> list[str]:
        values: dict[str, Any] = {
            "pretrain": self.model,
            "dataset": self.data,
            "input_key": "input",
            "output_key": "output",
            "input_template": "{}",
            "param_dtype": "fp32",
            "train_batch_size": 8,
            "micro_train_batch_size": 2,
            "max_len": 32,
            "learning_rate": 1e-3,
            "max_epochs": 2,
            "save_path": self.folder / name / "model",
            "ckpt_path": self.folder / name / "ckpt",
        }
        words: list[str] = []
        for flag, value in {**values, **flags}.items():
            if value is True:
                words.append(f"--{flag}")
            elif value is not False:
                words += [f"--{flag}", str(value)]
        return words

    def run(
        self, name: str, ranks: int = 1, launcher: str = "python", **flags: Any
    ) -> subprocess.CompletedProcess[str]:
        bin_dir = Path(sys.executable).parent
        module = ["openrlhf.cli.train_sft", *self.arguments(name, **flags)]
        torchrun = [f"--nproc_per_node={ranks}", f"--master_port={free_port('127.0.0.1')}"]
        command = {
            "python": [sys.executable, "-m", *module],
            "torchrun": [str(bin_dir / "torchrun"), *torchrun, "-m", *module],
            "deepspeed": [
                *[str(bin_dir / "deepspeed"), "--num_gpus", str(ranks)],
                *["--master_port", str(free_port("127.0.0.1")), "--module", *module],
            ],
        }[launcher if ranks == 1 or launcher != "python" else "torchrun"]
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        }
        return subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def metrics(self, name: str, kind: str = "train") -> dict[int, dict[str, Any]]:
        text = (self.folder / name / "ckpt" / "run" / "metrics.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return {line["step"]: line for line in found if line["kind"] == kind}

    def losses(self, name: str) -> list[float]:
        return [line["gpt_loss"] for _, line in sorted(self.metrics(name).items())]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """With one run that the tests compare others with: 32 rows, batch 8, 2 epochs, checkpoints every 3 steps."""
    bench = Bench(tmp_path_factory.mktemp("sft"))
    done = bench.run(
        "base",
        save_steps=3,
        save_hf_ckpt=True,
        max_ckpt_num=1,
        eval_dataset=bench.eval_data,
        use_tensorboard=bench.folder / "tb",
        wandb_run_name="base",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step ") == 8 and "step 8/8" in done.stdout
    return bench


def test_metrics_have_the_known_names(bench: Bench) -> None:
    train, evaluation = bench.metrics("base"), bench.metrics("base", "eval")
    assert sorted(train) == list(range(1, 9))
    assert {"gpt_loss", "lr", "grad_norm", "loss_mean"} <= set(train[1])
    assert sorted(evaluation) == [4, 8], "once an epoch"
    assert set(evaluation[4]) == {"kind", "step", "time", "eval gpt_loss"}
    assert train[8]["gpt_loss"] < train[1]["gpt_loss"] and evaluation[8]["eval gpt_loss"] < 4.5
    assert train[8]["lr"] == pytest.approx(1e-4) and train[8]["epoch"] == 2.0
    assert list((bench.folder / "tb" / "base").glob("events*"))


def test_saved_model_is_ready_for_others(bench: Bench) -> None:
    """F42."""
    out = bench.folder / "base" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    original = AutoTokenizer.from_pretrained(bench.model)
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.special_tokens_map == original.special_tokens_map
    assert model.config.tie_word_embeddings and "lm_head.weight" not in bench.weights("base")
    # the evaluation of the last step, done with stock transformers
    total, count = 0.0, 0
    with torch.no_grad():
        for row in map(json.loads, Path(bench.eval_data).read_text().splitlines()):
            prompt = tokenizer(row["input"]).input_ids
            ids = prompt + tokenizer(row["output"]).input_ids + [tokenizer.eos_token_id]
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            total -= sum(float(logprobs[t - 1, ids[t]]) for t in range(len(prompt), len(ids)))
            count += len(ids) - len(prompt)
    assert bench.metrics("base", "eval")[8]["eval gpt_loss"] == pytest.approx(total / count, abs=1e-5)


def test_checkpoint_layout(bench: Bench) -> None:
    root = bench.folder / "base" / "ckpt"
    assert (root / "latest").read_text() == "global_step6"
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["global_step6", "global_step6_hf", "run"]
    assert list((root / "global_step6").glob("*model_states.pt"))
    assert AutoModelForCausalLM.from_pretrained(root / "global_step6_hf") is not None


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, {"packing_samples": True}),
        (1, {"micro_train_batch_size": 8, "zero_stage": 0}),
        (2, {"packing_samples": True, "zero_stage": 3}),
        (2, {"micro_train_batch_size": 1, "gradient_checkpointing": True}),
    ],
)
def test_layout_does_not_change_the_training(bench: Bench, ranks: int, flags: dict[str, Any]) -> None:
    """F06, F20: ranks, packing, micro-batches and ZeRO stage."""
    name = f"layout{ranks}{len(flags)}{flags.get('zero_stage', '')}"
    done = bench.run(name, ranks, eval_dataset=bench.eval_data, **flags)
    assert done.returncode == 0, done.stderr
    assert bench.losses(name) == pytest.approx(bench.losses("base"), rel=1e-5)
    assert bench.losses(name)[0] == pytest.approx(bench.losses("base")[0], rel=1e-6)
    expected = bench.metrics("base", "eval")[4]["eval gpt_loss"]
    assert bench.metrics(name, "eval")[4]["eval gpt_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resume_equals_an_uninterrupted_run_bit_for_bit(bench: Bench, stop: int) -> None:
    """F16: before, at and after the end of an epoch."""
    name = f"resume{stop}"
    # killed after the checkpoint: the run writes its metrics and no model
    first = bench.run(name, save_steps=stop, max_steps=stop, lr_scheduler="constant", lr_warmup_ratio=0.0)
    assert first.returncode == 0, first.stderr
    second = bench.run(name, load_checkpoint=True, lr_scheduler="constant", lr_warmup_ratio=0.0)
    assert second.returncode == 0, second.stderr
    assert f"step {stop + 1}/8" in second.stdout and f"step {stop}/8" not in second.stdout
    if not (bench.folder / "constant").exists():
        assert bench.run("constant", lr_scheduler="constant", lr_warmup_ratio=0.0).returncode == 0
    assert bench.losses(name) == bench.losses("constant")
    straight, resumed = bench.weights("constant"), bench.weights(name)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_resume_of_a_finished_run_saves_again_and_ends(bench: Bench) -> None:
    name = "finished"
    assert bench.run(name, max_epochs=1, save_steps=4).returncode == 0
    before = bench.weights(name)
    done = bench.run(name, max_epochs=1, load_checkpoint=True)
    assert done.returncode == 0 and "nothing is left to train" in done.stderr
    assert all(torch.equal(before[key], value) for key, value in bench.weights(name).items())


def test_uneven_rows_do_not_hang(bench: Bench) -> None:
    """F48: 7 usable rows of unequal length, two ranks, batches by tokens: ranks have unequal numbers of rows."""
    rows = [{"input": f"{i}=", "output": str(i) * (1 + i)} for i in range(7)] + [{"input": "x", "output": ""}]
    started = time.monotonic()
    done = bench.run(
        "uneven",
        2,
        dataset=bench.write("uneven.jsonl", rows),
        train_batch_size=2,
        micro_train_batch_size=1,
        packing_samples=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < DEADLINE_S
    assert len(bench.losses("uneven")) == 7, "14 rows in two epochs, 2 a step"
    assert "1 of 8 rows are left out: 1 x empty response" in done.stderr


def test_deepspeed_launcher(bench: Bench) -> None:
    """It appends --local_rank."""
    done = bench.run("launcher", 1, "deepspeed", max_steps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bench.losses("launcher")[0] == pytest.approx(bench.losses("base")[0], rel=1e-6)


def test_lora_writes_an_adapter(bench: Bench) -> None:
    done = bench.run("lora", lora_rank=4, max_steps=2, zero_stage=3)
    if "LoRA is not available" in done.stderr:
        pytest.skip("the configuration does not allow LoRA yet")
    assert done.returncode == 0, done.stderr
    names = {p.name for p in (bench.folder / "lora" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"input_key": "prompt", "output_key": "gt"},
            "--input_key 'prompt', --output_key 'gt'; its columns are: input",
        ),
        ({"dataset": "missing.jsonl"}, "missing.jsonl"),
        ({"pretrain": "./missing"}, "missing"),
        ({"train_batch_size": 128}, "32 usable row(s) in 2 epoch(s) do not fill one batch of --train_batch_size 128"),
        ({"dataset": "null.jsonl"}, "row 1: column 'input' is null"),
        ({"lr_scheduler": "nonsense"}, "nonsense"),
    ],
)
def test_mistakes_end_early_with_a_message_and_leave_nothing(bench: Bench, flags: dict[str, Any], message: str) -> None:
    """F46."""
    bench.write("null.jsonl", [{"input": "a", "output": "b"}, {"input": None, "output": "b"}])
    done = bench.run("mistake", **flags)
    assert done.returncode in (1, 2), done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (bench.folder / "mistake").exists()


def test_resume_with_other_data_is_refused(bench: Bench) -> None:
    rows = [{"input": f"{i}=", "output": str(i)} for i in range(16)]
    done = bench.run(
        "base", load_checkpoint=True, save_path=bench.folder / "no", dataset=bench.write("other.jsonl", rows)
    )
    assert done.returncode == 1 and "32 usable rows, and now there are 16" in done.stderr
    assert not (bench.folder / "no").exists()
