"""The demo's task in every placement of models and engines, each tensor of each weight sync compared.

    python benchmarks/placements.py --gpus 2 [--per_gpu 4] [--out runs/placements] [--steps 40] [CASE ...]

Each case is the demo's RL stage from the same supervised model, with --check_weight_sync: it ends with an error if one
element of one tensor of an engine differs. Cases that take fewer GPUs than there are run side by side; the model is
tiny, so with --per_gpu several share a GPU. A case "killed" is killed half way and resumed. Printed are the mean reward
of the first and the last five steps, the held-out accuracy, the tensors that were compared, the seconds of a transfer,
and those from launch to the first step. Ends with status 1 if a case fails or does not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples/demo"), str(ROOT)]

from async_training import prepare  # noqa: E402
from hybrid_step import train_records  # noqa: E402
from run import rl_command  # noqa: E402

SECONDS = 400
SAVE_STEPS = 5
ENGINE_MEMORY = 0.6
"""Share of a GPU that the engines of all cases on it take."""
CACHE_GIB = "2"
"""The cache of an engine; were it measured, cases that share a GPU would count each other's memory."""
ENDS = 5
LEARNED_AFTER = 40
"""Steps after which a case must have learned; shorter runs only compare weights."""
LEAST_GAIN = 0.08
"""By which the mean reward must rise from the first to the last five of them; the demo's own is 0.12."""

TOGETHER = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"
CRITIC = "--advantage_estimator gae --critic_learning_rate 1e-3 --lambd 0.95 --critic_num_gpus_per_node 1"
REFERENCE = "--init_kl_coef 1e-4 --ref_num_gpus_per_node 1"


class Case(NamedTuple):
    """GPUs that a placement takes, the flags that ask for it, and whether the run is killed and resumed."""

    gpus: int
    flags: str
    killed: bool = False


CASES: dict[str, Case] = {
    "together": Case(1, f"{TOGETHER} --zero_stage 3"),
    "together_critic_ref": Case(1, f"{TOGETHER} {CRITIC} {REFERENCE} --zero_stage 2"),
    "together_lora": Case(1, f"{TOGETHER} --zero_stage 2 --lora_rank 16 --actor_learning_rate 2e-3"),
    "together_offload": Case(1, f"{TOGETHER} --zero_stage 2 --adam_offload"),
    "killed": Case(1, f"{TOGETHER} --zero_stage 2 --save_steps {SAVE_STEPS}", killed=True),
    "together_2_zero3": Case(2, f"{TOGETHER} --zero_stage 3 --actor_num_gpus_per_node 2 --vllm_num_engines 2"),
    "together_2_lora_zero3": Case(
        2,
        f"{TOGETHER} --zero_stage 3 --actor_num_gpus_per_node 2 --vllm_num_engines 2 --lora_rank 16"
        " --actor_learning_rate 2e-3",
    ),
    "together_2_tp2": Case(
        2, f"{TOGETHER} --zero_stage 2 --actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    ),
    "together_2_ring": Case(
        2, f"{TOGETHER} --zero_stage 3 --ring_attn_size 2 --actor_num_gpus_per_node 2 --vllm_num_engines 2"
    ),
    "together_2_autotp": Case(
        2, f"{TOGETHER} --zero_stage 2 --ds_tensor_parallel_size 2 --actor_num_gpus_per_node 2 --vllm_num_engines 2"
    ),
    "together_2_zpg": Case(2, f"{TOGETHER} --zero_stage 3 --zpg 2 --actor_num_gpus_per_node 2 --vllm_num_engines 2"),
    "apart": Case(2, "--zero_stage 2"),
    "apart_zpg": Case(3, "--zero_stage 3 --zpg 2 --actor_num_gpus_per_node 2"),
    "async": Case(2, "--zero_stage 2 --async_train --enable_vllm_is_correction"),
    "pairs": Case(
        4, f"{CRITIC} {REFERENCE} --colocate_actor_ref --colocate_critic_reward --vllm_num_engines 2 --zero_stage 2"
    ),
    "all_apart": Case(4, f"{CRITIC} {REFERENCE} --zero_stage 2"),
    "apart_tp2_zero3": Case(
        4, "--zero_stage 3 --actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    ),
}


def command(folder: Path, name: str, steps: int, seed: int, memory: float) -> list[str]:
    """The demo's RL command in another placement, in bf16, with folders of its own and this share for its engines."""
    own, flags = folder / name, CASES[name].flags.split()
    line = rl_command(folder, seed)
    line.remove("--colocate_all_models")
    paths = {"--save_path": own / "model", "--ckpt_path": own / "ckpt", "--run_dir": own / "run"}
    for flag, value in paths.items():
        line[line.index(flag) + 1] = str(value)
    # The flags of the case replace those of the demo, since a flag may be given once.
    for flag in [f for f in flags if f.startswith("--") and f in line]:
        at = line.index(flag)
        del line[at : at + 2]
    for flag in ("--micro_train_batch_size", "--micro_rollout_batch_size"):
        line[line.index(flag) + 1] = "16"
    line[line.index("--param_dtype") + 1] = "bf16"
    line[line.index("--vllm_gpu_memory_utilization") + 1] = f"{memory:.3f}"
    return [*line, *flags, "--vllm_kv_cache_gib", CACHE_GIB, "--check_weight_sync", "--max_steps", str(steps)]


started: list[subprocess.Popen[bytes]] = []


def run_command(line: list[str], own: Path, devices: list[int], kill_after: int | None = None) -> str | None:
    """Run to the end, or until step ``kill_after`` and kill all its processes; what went wrong, or None."""
    visible = ",".join(map(str, devices))
    environment = {**os.environ, "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1"}
    deadline = time.monotonic() + SECONDS
    with open(own / "out.log", "a") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=environment, start_new_session=True)
        started.append(process)
        while process.poll() is None:
            if kill_after and len(train_records(own / "run")) >= kill_after:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return None
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGTERM)
                process.wait()
                return f"not done after {SECONDS} s"
            time.sleep(0.2)
    if process.returncode or kill_after:
        return f"ended with status {process.returncode}: {(own / 'out.log').read_text()[-1500:]}"
    return None


def run_case(folder: Path, name: str, options: argparse.Namespace, devices: list[int]) -> dict[str, Any]:
    """Run a case on these GPUs; its figures, or its error."""
    own, steps = folder / name, options.steps
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    started = time.time()
    line = command(folder, name, steps, options.seed, ENGINE_MEMORY / options.per_gpu)
    resumed = {}
    if CASES[name].killed:
        if error := run_command(line, own, devices, kill_after=max(SAVE_STEPS + 1, steps // 2)):
            return {"error": error}
        resumed = {"killed_after": len(train_records(own / "run"))}
        line.append("--load_checkpoint")
    if error := run_command(line, own, devices):
        return {"error": error}
    train = train_records(own / "run")
    if [record["step"] for record in train] != list(range(1, steps + 1)):
        return {"error": f"steps {[record['step'] for record in train]}"}
    if resumed and "Resumed after step" not in (own / "out.log").read_text():
        return {"error": "it began anew instead of resuming"}
    rewards = [record["reward"] for record in train]
    return {
        **resumed,
        "first": sum(rewards[:ENDS]) / len(rewards[:ENDS]),
        "last": sum(rewards[-ENDS:]) / len(rewards[-ENDS:]),
        "tensors": sum(record["sync/compared_tensors"] for record in train),
        "differing": sum(record["sync/differing_elements"] for record in train),
        "transfer": sum(record["timing/sync_transfer"] for record in train) / len(train),
        "first_step": train[0]["time"] - started,
        "step": (train[-1]["time"] - train[0]["time"]) / max(1, len(train) - 1),
    }


def waves(names: list[str], gpus: int, per_gpu: int) -> list[list[tuple[str, list[int]]]]:
    """Which cases run at the same time, and on which GPUs: those that take many first, each on the emptiest GPUs."""
    planned: list[list[tuple[str, list[int]]]] = []
    for name in sorted(names, key=lambda n: -CASES[n].gpus):
        for wave in [*planned, []]:
            taken = [sum(gpu in devices for _, devices in wave) for gpu in range(gpus)]
            devices = sorted(sorted(range(gpus), key=lambda gpu: taken[gpu])[: CASES[name].gpus])
            if all(taken[gpu] < per_gpu for gpu in devices):
                break
        if not wave:
            planned.append(wave)
        wave.append((name, devices))
    return planned


def run_cases(folder: Path, names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """All cases, as many at once as there is room for."""
    results: dict[str, dict[str, Any]] = {}

    def work(name: str, devices: list[int]) -> None:
        results[name] = run_case(folder, name, options, devices)
        print(f"{name}: {json.dumps(results[name])}", flush=True)

    for wave in waves(names, options.gpus, options.per_gpu):
        threads = [threading.Thread(target=work, args=case) for case in wave]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def report(folder: Path, results: dict[str, dict[str, Any]], learning: bool) -> int:
    """Print the table; 1 if a case failed or did not learn."""
    from evaluate import accuracy

    failed = 0
    columns = ("reward", "held out", "tensors", "differ", "transfer", "start", "step")
    print(f"\n{'case':<22}{columns[0]:>16}" + "".join(f"{column:>10}" for column in columns[1:]))
    for name, result in results.items():
        if "error" in result:
            failed += 1
            print(f"{name:<22}FAILED: {result['error'].strip().splitlines()[-1][:160]}")
            continue
        share = (
            f"{accuracy(folder / name / 'model', folder / 'data/held_out.jsonl'):.1%}" if "lora" not in name else "-"
        )
        bad = learning and result["last"] - result["first"] < LEAST_GAIN
        failed += bad
        print(
            f"{name:<22}{result['first']:>7.3f} -> {result['last']:.3f}{share:>10}{result['tensors']:>10.0f}"
            f"{result['differing']:>10.0f}{result['transfer']:>8.3f} s{result['first_step']:>8.0f} s"
            f"{result['step']:>8.2f} s" + ("  DID NOT LEARN" if bad else "")
        )
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE", help="all that fit, if not given")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--per_gpu", type=int, default=1, help="cases that share a GPU at the same time")
    parser.add_argument("--steps", type=int, default=LEARNED_AFTER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/placements"))
    options = parser.parse_args()
    names = options.cases or [name for name, case in CASES.items() if case.gpus <= options.gpus]
    prepare(options.out, options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"stopped by {signal.SIGTERM.name}"))
    try:
        results = run_cases(options.out, names, options)
    finally:
        # Runs are sessions of their own: what ends this one does not reach them, and they would keep their GPUs.
        for process in started:
            process.terminate()
    return report(options.out, {name: results[name] for name in names}, options.steps >= LEARNED_AFTER)


if __name__ == "__main__":
    sys.exit(main())
