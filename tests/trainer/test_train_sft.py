"""train_sft as a user runs it: whole processes on a tiny model, one and two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import unused_port
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = pytest.mark.e2e

DEADLINE_S = 600
BIN = Path(sys.executable).parent
SESSION = Path(__file__).parent / "sft_session.py"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Done:
    """What a finished run printed, and its exit status."""

    code: int
    out: str
    err: str


class Bench:
    """A folder with a model and data, and ways to run the command on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny_model(folder / "model", "qwen3", tie=True)
        rows = [{"input": f"{a}+{b}=", "output": str(a + b)} for a in range(5, 9) for b in range(7, 15)]
        self.data = self.write("train.jsonl", rows)
        self.eval_data = self.write("eval.jsonl", [{"input": f"{a}+1=", "output": str(a + 1)} for a in range(0, 50, 7)])
        self.done: dict[str, Done] = {}

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

    def start(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command with this checkout's code, without the network."""
        env = {
            **{key: value for key, value in os.environ.items() if key not in LAUNCHER},
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        return subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    def launch(self, name: str, *launcher: str, **flags: Any) -> Done:
        """One run, in processes of its own."""
        done = self.start([*launcher, "openrlhf.cli.train_sft", *self.arguments(name, **flags)])
        return Done(done.returncode, done.stdout, done.stderr)

    def session(self, ranks: int, jobs: list[tuple[str, str, dict[str, Any]]]) -> None:
        """Several runs in one start, by Python or torchrun: (key of the result, folder of the run, flags)."""
        logs = self.folder / f"logs{ranks}"
        logs.mkdir()
        listed = [[key, self.arguments(name, **flags)] for key, name, flags in jobs]
        (logs / "jobs.json").write_text(json.dumps(listed))
        launcher = torchrun(ranks) if ranks > 1 else [sys.executable]
        done = self.start([*launcher, str(SESSION), str(logs / "jobs.json"), str(logs)])
        assert done.returncode == 0, done.stderr
        for key, _, _ in jobs:
            codes = {int((logs / f"{key}.{rank}.code").read_text()) for rank in range(ranks)}
            errors = "".join((logs / f"{key}.{rank}.err").read_text() for rank in range(ranks))
            self.done[key] = Done(max(codes), (logs / f"{key}.0.out").read_text(), errors)

    def metrics(self, name: str, kind: str = "train") -> dict[int, dict[str, Any]]:
        text = (self.folder / name / "ckpt" / "run" / "metrics.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return {line["step"]: line for line in found if line["kind"] == kind}

    def losses(self, name: str) -> list[float]:
        return [line["gpt_loss"] for _, line in sorted(self.metrics(name).items())]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "model" / "model.safetensors")


def torchrun(ranks: int) -> list[str]:
    return [str(BIN / "torchrun"), f"--nproc_per_node={ranks}", f"--master_port={unused_port()}"]


CONSTANT = {"lr_scheduler": "constant", "lr_warmup_ratio": 0.0}
STOPS = (3, 4, 5)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "packed": (1, {"packing_samples": True}),
    "large micro-batches without ZeRO": (1, {"micro_train_batch_size": 8, "zero_stage": 0}),
    "two ranks, packed, ZeRO-3": (2, {"packing_samples": True, "zero_stage": 3}),
    "two ranks share sequences": (2, {"packing_samples": True, "ring_attn_size": 2, "zero_stage": 3}),
    "two ranks, small micro-batches": (2, {"micro_train_batch_size": 1, "gradient_checkpointing": True}),
}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"input_key": "prompt", "output_key": "gt"}, "--input_key 'prompt', --output_key 'gt'; its columns are: input"),
    ({"dataset": "missing.jsonl"}, "missing.jsonl"),
    ({"pretrain": "./missing"}, "missing"),
    ({"train_batch_size": 128}, "32 usable row(s) in 2 epoch(s) do not fill one batch of --train_batch_size 128"),
    ({"dataset": "null.jsonl"}, "row 1: column 'input' is null"),
    ({"lr_scheduler": "nonsense"}, "nonsense"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """With all runs done. The first, that others are compared with: 32 rows, batch 8, 2 epochs."""
    bench = Bench(tmp_path_factory.mktemp("sft"))
    bench.write("null.jsonl", [{"input": "a", "output": "b"}, {"input": None, "output": "b"}])
    other = bench.write("other.jsonl", [{"input": f"{i}=", "output": str(i)} for i in range(16)])
    uneven = [{"input": f"{i}=", "output": str(i) * (1 + i)} for i in range(7)] + [{"input": "x", "output": ""}]
    evaluated = {"eval_dataset": bench.eval_data}
    base = {
        "save_steps": 3,
        "save_hf_ckpt": True,
        "max_ckpt_num": 1,
        "use_tensorboard": bench.folder / "tb",
        "wandb_run_name": "base",
        **evaluated,
    }
    jobs: list[tuple[str, str, dict[str, Any]]] = [("base", "base", base), ("constant", "constant", CONSTANT)]
    for stop in STOPS:
        jobs.append((f"stop{stop}", f"resume{stop}", {"save_steps": stop, "max_steps": stop, **CONSTANT}))
        jobs.append((f"resume{stop}", f"resume{stop}", {"load_checkpoint": True, **CONSTANT}))
    jobs.append(("finish", "finished", {"max_epochs": 1, "save_steps": 4}))
    jobs.append(
        ("finished", "finished", {"max_epochs": 1, "load_checkpoint": True, "save_path": bench.folder / "again"})
    )
    refused = {"load_checkpoint": True, "save_path": bench.folder / "no", "dataset": other}
    jobs.append(("other data", "base", refused))
    jobs.append(("lora", "lora", {"lora_rank": 4, "max_steps": 2, "zero_stage": 3}))
    jobs += [(f"mistake{i}", "mistake", flags) for i, (flags, _) in enumerate(MISTAKES)]
    jobs += [(name, name, {**flags, **evaluated}) for name, (ranks, flags) in LAYOUTS.items() if ranks == 1]
    bench.session(1, jobs)
    two: list[tuple[str, str, dict[str, Any]]]
    two = [(name, name, {**flags, **evaluated}) for name, (ranks, flags) in LAYOUTS.items() if ranks == 2]
    few = {"dataset": bench.write("uneven.jsonl", uneven), "train_batch_size": 2, "micro_train_batch_size": 1}
    two.append(("uneven", "uneven", {**few, "packing_samples": True}))
    bench.session(2, two)
    assert bench.done["base"].code == 0, bench.done["base"].err
    return bench


def test_every_step_is_a_line(bench: Bench) -> None:
    out = bench.done["base"].out
    assert out.count("step ") == 8 and "step 8/8" in out and out.count("eval gpt_loss") == 2


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


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layout_does_not_change_the_training(bench: Bench, name: str) -> None:
    """Ranks, packing, micro-batches and ZeRO stage."""
    assert bench.done[name].code == 0, bench.done[name].err
    assert bench.losses(name) == pytest.approx(bench.losses("base"), rel=1e-5)
    assert bench.losses(name)[0] == pytest.approx(bench.losses("base")[0], rel=1e-6)
    expected = bench.metrics("base", "eval")[4]["eval gpt_loss"]
    assert bench.metrics(name, "eval")[4]["eval gpt_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stop", STOPS)
def test_resume_equals_an_uninterrupted_run_bit_for_bit(bench: Bench, stop: int) -> None:
    """Before, at and after the end of an epoch."""
    first, second = bench.done[f"stop{stop}"], bench.done[f"resume{stop}"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert f"step {stop + 1}/8" in second.out and f"step {stop}/8" not in second.out
    name = f"resume{stop}"
    assert bench.losses(name) == bench.losses("constant")
    straight, resumed = bench.weights("constant"), bench.weights(name)
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)


def test_resume_of_a_finished_run_saves_again_and_ends(bench: Bench) -> None:
    done = bench.done["finished"]
    assert done.code == 0 and "nothing is left to train" in done.err
    again = load_file(bench.folder / "again" / "model.safetensors")
    assert all(torch.equal(again[key], value) for key, value in bench.weights("finished").items())


def test_resume_with_other_data_is_refused(bench: Bench) -> None:
    done = bench.done["other data"]
    assert done.code == 1 and "32 usable rows, and now there are 16" in done.err
    assert not (bench.folder / "no").exists()


def test_uneven_rows_do_not_hang(bench: Bench) -> None:
    """7 usable rows of unequal length, two ranks, batches by tokens: ranks have unequal numbers of rows."""
    done = bench.done["uneven"]
    assert done.code == 0, done.err
    assert len(bench.losses("uneven")) == 7, "14 rows in two epochs, 2 a step"
    assert "1 of 8 rows are left out: 1 x empty response" in done.err


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_end_early_with_a_message_and_leave_nothing(bench: Bench, number: int) -> None:
    done, message = bench.done[f"mistake{number}"], MISTAKES[number][1]
    assert done.code in (1, 2), done.err
    assert message in done.err and "Traceback" not in done.err, done.err
    assert not (bench.folder / "mistake").exists()


def test_lora_writes_an_adapter(bench: Bench) -> None:
    done = bench.done["lora"]
    assert done.code == 0, done.err
    names = {p.name for p in (bench.folder / "lora" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names


def test_the_deepspeed_launcher(bench: Bench) -> None:
    """It appends --local_rank. The sessions above are plain Python with one rank, and torchrun with two."""
    port = ["--master_port", str(unused_port())]
    launcher = [str(BIN / "deepspeed"), "--num_gpus", "1", *port, "--module"]
    done = bench.launch("deepspeed", *launcher, max_steps=1)
    assert done.code == 0, done.out + done.err
    assert bench.losses("deepspeed")[0] == pytest.approx(bench.losses("base")[0], rel=1e-6)
