"""The main examples of README.md, run in a small form: its files are made, and sizes for a CPU come last."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ppo_helpers import Command, CommandRun, marked_processes, write_reward
from transformers import AutoModelForCausalLM

from openrlhf.utils.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from documented_commands import marked_blocks  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCKS = marked_blocks(ROOT / "README.md")
SUPERVISED = "--param_dtype fp32 --max_len 48 --train_batch_size 8 --micro_train_batch_size 4 --max_samples 16"
SMALL = {
    "train_sft": SUPERVISED,
    "train_rm": SUPERVISED,
    "train_dpo": SUPERVISED,
    "train_ppo_ray": """
        --param_dtype fp32 --max_len 48 --max_new_tokens 8 --rollout_batch_size 4 --n_samples_per_prompt 4
        --train_batch_size 16 --micro_train_batch_size 8 --micro_rollout_batch_size 8 --max_steps 1
        --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1
        --vllm_cpu_kvcache_gib 0.125""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the examples read; each adds what it writes, and later ones use it."""
    path = tmp_path_factory.mktemp("readme")
    make_tiny_model(path / "base")
    questions = [{"question": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(16)]
    pairs = [{"question": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 2)} for i in range(16)]
    for name, rows in (("questions", questions), ("pairs", pairs)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_reward(path / "reward_func.py")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CommandRun:
    command, arguments = BLOCKS[name]
    monkeypatch.chdir(folder)
    done = Command(f"openrlhf.cli.{command}", [*arguments, *SMALL[name].split()]).run()
    assert done.code == 0, done.output[-4000:]
    return done


def test_train_sft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("train_sft", folder, monkeypatch)
    assert AutoModelForCausalLM.from_pretrained(folder / "sft").num_parameters() > 0


def test_train_rm_and_serve_rm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _need_sft(folder)
    run_example("train_rm", folder, monkeypatch)
    command, arguments = BLOCKS["serve_rm"]
    port = _free_port()
    serve = Command(f"openrlhf.cli.{command}", [*arguments, "--port", str(port), "--max_len", "48"])
    server = serve.start()
    try:
        body = json.dumps({"query": ["1+1=2"], "prompts": ["1+1="], "labels": ["2"]}).encode()
        reply = _post(f"http://127.0.0.1:{port}/get_reward", body, server)
        assert len(reply["rewards"]) == 1
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=60)
    assert server.returncode == 0, output
    assert not marked_processes(serve.mark)


def test_train_dpo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _need_sft(folder)
    run_example("train_dpo", folder, monkeypatch)
    assert AutoModelForCausalLM.from_pretrained(folder / "dpo").num_parameters() > 0


def test_train_ppo_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _need_sft(folder)
    done = run_example("train_ppo_ray", folder, monkeypatch)
    assert "step 1/" in done.output
    assert AutoModelForCausalLM.from_pretrained(folder / "rl").num_parameters() > 0


def _need_sft(folder: Path) -> None:
    """The examples start from ./sft; a test that runs alone gets the base model under that name."""
    if not (folder / "sft" / "config.json").exists():
        shutil.copytree(folder / "base", folder / "sft", dirs_exist_ok=True)


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _post(url: str, body: bytes, server: subprocess.Popen[str], seconds: float = 120) -> dict[str, list[float]]:
    """POST as soon as the server listens."""
    deadline = time.monotonic() + seconds
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())
        except ConnectionError as error:
            last: Exception = error
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError):
                raise
            last = error
        assert server.poll() is None and time.monotonic() < deadline, last
        time.sleep(0.5)
