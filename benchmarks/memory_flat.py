"""Memory of every process of train_ppo_ray over many steps: it must not grow with their number.

    python benchmarks/memory_flat.py [--steps 200] [--tolerance 10] [--out runs/memory] [-- further flags of the run]

A tiny model is trained for --steps rollouts of 32 short samples, with --dump_rollouts on. After each step the resident
memory (VmRSS) of the driver, the engine's and the trainer's actors and vLLM's own process is read from /proc. Printed
are the means of the first and the last quarter of the steps, and the slope of a straight line through the last three
quarters (the first is warm-up: caches fill, allocators settle). Ends with status 1 when a process grows by more than
--tolerance MiB in 100 steps. The engine's KV cache is small (20 MiB): its pages count when they are first written to,
so a large one looks like a leak until all of it has been used once. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "OPENRLHF_MEMORY_FLAT"
PROMPTS, SAMPLES = 8, 4
REWARD = '''
def reward_func(queries, prompts, labels):
    """The share of digits that are the last digit of the label."""
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = [text.count(label[-1]) / max(len(text), 1) for text, label in zip(texts, labels)]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"response_chars": [len(text) for text in texts]}}
'''
Series = dict[str, list[tuple[int, float]]]


def command(folder: Path, steps: int, more: list[str]) -> list[str]:
    """Makes model, prompts and reward in `folder`; returns the command that trains on them."""
    from openrlhf.utils.tiny_model import make_tiny_model

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = make_tiny_model(folder / "model")
    rows = [
        {"input": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10 + i // 10 % 10)} for i in range(steps * PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    batch = PROMPTS * SAMPLES
    flags = f"""--pretrain {model} --prompt_data {folder}/prompts.jsonl --input_key input --label_key answer
        --remote_rm_url {folder}/reward.py --advantage_estimator group_norm --init_kl_coef 0
        --actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_kv_cache_gib 0.02 --colocate_all_models
        --enforce_eager --vllm_max_num_seqs 8 --n_samples_per_prompt {SAMPLES} --rollout_batch_size {PROMPTS}
        --train_batch_size {batch} --micro_train_batch_size {batch} --micro_rollout_batch_size {batch}
        --max_len 48 --max_new_tokens 12 --param_dtype fp32 --packing_samples --actor_learning_rate 1e-4
        --dump_rollouts {folder}/dump --run_dir {folder}/run --save_path {folder}/trained --ckpt_path {folder}/ckpt"""
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags.split(), *more]


def resident(mark: str) -> dict[str, float]:
    """Resident MiB of the run's own processes, by name; processes of the same name are numbered by their ids."""
    found: dict[str, list[tuple[int, float]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            name = _role((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            size = re.search(r"^VmRSS:\s+(\d+)", (folder / "status").read_text(), re.M)
        except OSError:
            continue  # it ended meanwhile
        if name and size:
            found.setdefault(name, []).append((int(folder.name), int(size[1]) / 1024))
    return {
        name if len(sizes) == 1 else f"{name} {index}": mib
        for name, sizes in found.items()
        for index, (_, mib) in enumerate(sorted(sizes))
    }


def _role(command_line: str) -> str | None:
    """What to call a process; None for those of Ray itself and short-lived children."""
    if "-m openrlhf.cli.train_ppo_ray" in command_line:
        return "driver"
    match = re.match(r"ray::(\w+)|(VLLM::\w+)", command_line)
    # An actor's title has the method that it is running, or none.
    return (match[1] or match[2]) if match and match[1] != "IDLE" else None


def measure(arguments: list[str], folder: Path, seconds: float) -> Series:
    """Runs the command; the resident memory of its processes after each step."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "RAY_ADDRESS": "local", MARK: mark, "HF_HUB_OFFLINE": "1"}
    series: Series = {}
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + seconds
        seen = 0
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    sys.exit(f"not done after {seconds:g} s; see {folder}/output.log")
                metrics = folder / "run/metrics.jsonl"
                step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                if step > seen:
                    seen = step
                    for name, mib in resident(mark).items():
                        series.setdefault(name, []).append((step, mib))
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # it ends its engines and trainers
                process.wait(60)
    if process.returncode:
        sys.exit(f"train_ppo_ray ended with status {process.returncode}; see {folder}/output.log")
    return series


def slope(points: list[tuple[int, float]]) -> float:
    """Least-squares slope in MiB for 100 steps."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 100 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tolerance", type=float, default=10.0, help="MiB that a process may grow in 100 steps")
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long the run may take")
    parser.add_argument("flags", nargs="*", help="further flags of train_ppo_ray, after --")
    options = parser.parse_args()
    folder = options.out.absolute()
    series = measure(command(folder, options.steps, options.flags), folder, options.seconds)
    (folder / "memory.json").write_text(json.dumps(series), encoding="utf-8")
    print(f"{options.steps} steps; resident MiB\nprocess                    first quarter  last quarter  MiB/100 steps")
    growing = []
    for name, points in sorted(series.items()):
        first = [mib for step, mib in points if step <= options.steps / 4]
        late = [(step, mib) for step, mib in points if step > options.steps / 4]
        last = [mib for step, mib in points if step > 3 * options.steps / 4]
        if len(first) < 2 or len(last) < 2:
            continue  # it did not live through the run
        rate = slope(late)
        print(f"{name:<26}{sum(first) / len(first):>14.1f}{sum(last) / len(last):>14.1f}{rate:>15.2f}")
        if rate > options.tolerance:
            growing.append(name)
    dumps = sum(file.stat().st_size for file in (folder / "dump").iterdir()) / 2**20
    print(f"dumped {len(list((folder / 'dump').iterdir()))} files, {dumps:.1f} MiB")
    if growing:
        print(f"more than {options.tolerance:g} MiB/100 steps: {', '.join(growing)}")
    return 1 if growing else 0


if __name__ == "__main__":
    sys.exit(main())
