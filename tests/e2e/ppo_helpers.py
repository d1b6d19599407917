"""What the end-to-end tests of train_ppo_ray share: a tiny model, prompts, rewards, and a way to run the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "OPENRLHF_TEST_RUN"

REWARD_FILE = '''
def reward_func(queries, prompts, labels):
    """The share of digits in the response that are the last digit of the right answer."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        response = query[len(prompt):].replace("<eos>", "")
        rewards.append(response.count(label[-1]) / max(len(response), 1))
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"response_chars": [len(q) for q in queries]}}
'''


def write_prompts(path: Path, count: int = 32) -> Path:
    """Additions of two digits: input, answer."""
    rows = [{"input": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10 + i // 10 % 10)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_reward(path: Path) -> Path:
    path.write_text(REWARD_FILE)
    return path


@dataclass
class CommandRun:
    """A finished command."""

    code: int
    output: str
    seconds: float
    mark: str


@dataclass
class Command:
    """``python -m`` with an environment of its own, marked so that every process below it can be found."""

    module: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "RAY_ADDRESS": "local",  # never a cluster that happens to run on this machine
            "PYTHONUNBUFFERED": "1",
            MARK: self.mark,
            **self.environment,
        }
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def run(self, timeout: float = 600) -> CommandRun:
        started = time.monotonic()
        process = self.start()
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"not done after {timeout} s:\n{output[-4000:]}") from None
        return CommandRun(process.returncode, output, time.monotonic() - started, self.mark)


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Living processes that carry a mark in their environment: (pid, command line)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except (OSError, UnicodeDecodeError):
            continue  # it ended meanwhile
    return found


def assert_nothing_left(mark: str, shared_memory_before: set[str], patience: float = 60.0) -> None:
    """No process of the command lives, and no file in /dev/shm is left; Ray's own processes get a few seconds."""
    deadline = time.monotonic() + patience
    while ((left := marked_processes(mark)) or abandoned_shared_memory() - shared_memory_before) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.25)
    assert not left, f"processes left behind: {left}"
    new = abandoned_shared_memory() - shared_memory_before
    assert not new, f"shared memory left behind: {sorted(new)}"


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def abandoned_shared_memory() -> set[str]:
    """Files in /dev/shm that no process has open or mapped: those of living ones belong to other tests."""
    files: dict[int, str] = {}
    for entry in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):  # it was removed meanwhile
            files[entry.stat().st_ino] = entry.name
    device = Path("/dev/shm").stat().st_dev
    mapped = f"{os.major(device):02x}:{os.minor(device):02x}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # Semaphores are mapped under another name than they get.
            for line in (process / "maps").read_text().splitlines():
                _, _, _, place, inode, *_ = line.split(maxsplit=5)
                if place == mapped:
                    files.pop(int(inode), None)
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = link.stat()
                    if found.st_dev == device:
                        files.pop(found.st_ino, None)
    return set(files.values()) & shared_memory()


def read_metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one kind."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def ppo_arguments(model: str, prompts: Path, out: Path, *more: str, reward: Path | str | None = None) -> list[str]:
    """A small run: 8 prompts of 4 samples a rollout, 16 samples an optimizer step, fp32."""
    arguments = f"""
        --pretrain {model} --prompt_data {prompts} --input_key input --label_key answer
        --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --reward_num_gpus_per_node 1
        --vllm_num_engines 1 --vllm_kv_cache_gib 0.125
        --advantage_estimator group_norm --n_samples_per_prompt 4 --rollout_batch_size 8 --train_batch_size 16
        --micro_train_batch_size 4 --micro_rollout_batch_size 4 --max_len 48 --max_new_tokens 12
        --param_dtype fp32 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3
        --save_path {out / "model"} --ckpt_path {out / "ckpt"}
    """.split()
    if reward is not None:
        arguments += ["--remote_rm_url", str(reward)]
    return [*arguments, *more]
