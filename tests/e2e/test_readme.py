"""The main examples of README.md as one pipeline, in a small form: its files are made, and sizes for a CPU come last.

SFT, then a reward model and DPO on top of it, the reward model behind HTTP, PPO with that server, the adapter merged.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import unused_port
from ppo_helpers import Command, CommandRun, marked_processes, read_metrics, write_reward
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrlhf.cli import batch_inference, lora_combiner
from openrlhf.utils.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from documented_commands import marked_blocks  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCKS = marked_blocks(ROOT / "README.md")
SUPERVISED = """--param_dtype fp32 --max_len 48 --train_batch_size 16 --micro_train_batch_size 16
    --lr_scheduler constant --lr_warmup_ratio 0 """
SMALL = {
    "train_sft": SUPERVISED + "--max_epochs 3 --learning_rate 1e-3",
    "train_rm": SUPERVISED + "--max_epochs 6 --learning_rate 3e-3 --eval_dataset ./held_out.jsonl",
    "train_dpo": SUPERVISED + "--max_epochs 4 --learning_rate 1e-3 --eval_dataset ./held_out.jsonl",
    "train_ppo_ray": """
        --param_dtype fp32 --max_len 48 --max_new_tokens 8 --rollout_batch_size 4 --n_samples_per_prompt 4
        --train_batch_size 16 --micro_train_batch_size 8 --micro_rollout_batch_size 8 --max_steps 2
        --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1
        --vllm_kv_cache_gib 0.125 --lora_rank 4 --actor_learning_rate 1e-3 --lr_warmup_ratio 0
        --enable_ema --ema_beta 0.9""",
}


def preference_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums with an answer in digits, which is better, and one in letters."""
    rng = random.Random(seed)

    def answer(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 4)))

    return [
        {
            "question": f"{rng.randrange(50)}+{rng.randrange(50)}=",
            "chosen": answer("0123456789"),
            "rejected": answer("uvwxyz"),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the examples read; each adds what it writes, and later ones use it."""
    path = tmp_path_factory.mktemp("readme")
    make_tiny_model(path / "base")
    questions = [{"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(32)]
    files = {"questions": questions, "pairs": preference_pairs(96, 1), "held_out": preference_pairs(40, 2)}
    for name, rows in files.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_reward(path / "reward_func.py")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run_example(name: str, folder: Path, *flags: str) -> CommandRun:
    """An example in its small form, in the folder; its checkpoints and metrics go to ``<name>_ckpt``."""
    command, arguments = BLOCKS[name]
    own = [*SMALL[name].split(), "--ckpt_path", str(folder / f"{name}_ckpt"), *flags]
    done = Command(f"openrlhf.cli.{command}", [*arguments, *own]).run()
    assert done.code == 0, done.output[-4000:]
    return done


def test_from_sft_to_a_merged_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command takes what the one before has written, and does what it is for."""
    monkeypatch.chdir(folder)
    run_example("train_sft", folder)
    losses = [step["gpt_loss"] for step in read_metrics(folder / "train_sft_ckpt/run")]
    assert losses[-1] < losses[0] - 0.5

    run_example("train_rm", folder)
    assert read_metrics(folder / "train_rm_ckpt/run", "eval")[-1]["acc_mean"] >= 0.9

    command, arguments = BLOCKS["serve_rm"]
    port = unused_port()
    serve = Command(
        f"openrlhf.cli.{command}", [*arguments, "--port", str(port), "--max_len", "48", "--param_dtype", "fp32"]
    )
    server = serve.start()
    try:
        run_example("train_dpo", folder)  # meanwhile the server starts
        check_dpo(folder)
        texts = check_scores(folder, f"http://127.0.0.1:{port}/get_reward", server)
        run_example("train_ppo_ray", folder, "--remote_rm_url", f"http://127.0.0.1:{port}/get_reward")
        steps = read_metrics(folder / "train_ppo_ray_ckpt/run")
        assert [step["reward/failures"] for step in steps] == [0, 0]
        assert all(step["sync/logprob_diff_max"] <= 1e-5 for step in steps)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as reply:
            counts = dict(line.rsplit(b" ", 1) for line in reply.read().splitlines() if line[:1] != b"#")
        assert float(counts[b"rm_texts_total"]) == texts + 2 * 16, "every sample of both steps was scored once"
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=300)
    assert server.returncode == 0, output
    assert not marked_processes(serve.mark)

    # Adam's first step moves every weight by the rate, 1e-3; the average has a tenth of it, and of the sum of both.
    adapter = load_file(folder / "rl/adapter_model.safetensors")
    moved = max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name)
    assert 1e-5 < moved < 3e-4
    merge = "--model_path ./sft --lora_path ./rl --output_path ./merged --param_dtype fp32 --verify"
    assert lora_combiner.main(merge.split()) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("sft", "merged"))
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)


def check_dpo(folder: Path) -> None:
    """The chosen answers gained on the rejected ones, on pairs that were not trained on, too."""
    steps = read_metrics(folder / "train_dpo_ckpt/run")
    margins = [step["chosen_reward"] - step["reject_reward"] for step in steps]
    assert abs(margins[0]) < 1e-6, "policy and reference start equal"
    assert margins[-1] > 0.1
    assert read_metrics(folder / "train_dpo_ckpt/run", "eval")[-1]["acc_mean"] >= 0.9
    assert AutoModelForCausalLM.from_pretrained(folder / "dpo").num_parameters() > 0


def check_scores(folder: Path, url: str, server: subprocess.Popen[str]) -> int:
    """batch_inference and the server give the held-out answers the same scores, right ones higher; their number."""
    held_out = preference_pairs(40, 2)
    answers = [{"input": row["question"], "output": row[half]} for row in held_out for half in ("chosen", "rejected")]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    flags = "--eval_task rm --pretrain ./rm --dataset ./answers.jsonl --input_key input --output_key output"
    more = "--input_template {} --param_dtype fp32 --max_len 48 --output_path ./scores.jsonl"
    assert batch_inference.main([*flags.split(), *more.split()]) == 0
    scores = [json.loads(line)["reward"] for line in (folder / "scores.jsonl").read_text().splitlines()]
    higher = [chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    assert sum(higher) >= 0.9 * len(held_out)
    body = {"query": [row["input"] + row["output"] for row in answers], "prompts": [""] * 80, "labels": [""] * 80}
    reply = _post(url, json.dumps(body).encode(), server)
    assert reply["rewards"] == pytest.approx(scores, abs=1e-5)
    return len(answers)


def _post(url: str, body: bytes, server: subprocess.Popen[str], seconds: float = 120) -> dict[str, list[float]]:
    """POST as soon as the server listens."""
    deadline = time.monotonic() + seconds
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return json.loads(reply.read())
        except ConnectionError as error:
            last: Exception = error
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            last = error
        assert server.poll() is None and time.monotonic() < deadline, last
        time.sleep(0.5)
