"""The demo's task in every placement of models and engines, each tensor of each weight sync compared.

    python benchmarks/placements.py --gpus 2 [--out runs/placements] [--steps 40] [CASE ...]

Each case is the demo's RL stage from the same supervised model, with --check_weight_sync: it ends with an error if one
element of one tensor of an engine differs. Cases that take fewer GPUs than there are run side by side. Printed are the
transport, the mean reward of the first and the last five steps, the held-out accuracy, the tensors that were compared,
and the seconds from launch to the first step. Ends with status 1 if a case fails or does not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples/demo"), str(ROOT)]

from async_training import prepare  # noqa: E402
from run import rl_command  # noqa: E402

SECONDS = 400
ENDS = 5
LEAST_GAIN = 0.08
"""By which the mean reward must rise from the first to the last five steps; the demo's own is 0.12."""

TOGETHER = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"
CRITIC = "--advantage_estimator gae --critic_learning_rate 1e-3 --lambd 0.95 --critic_num_gpus_per_node 1"
REFERENCE = "--init_kl_coef 1e-4 --ref_num_gpus_per_node 1"


class Case(NamedTuple):
    """GPUs that a placement takes, and the flags that ask for it."""

    gpus: int
    flags: str


CASES: dict[str, Case] = {
    "together": Case(1, f"{TOGETHER} --zero_stage 3"),
    "together_critic_ref": Case(1, f"{TOGETHER} {CRITIC} {REFERENCE} --zero_stage 2"),
    "together_lora": Case(1, f"{TOGETHER} --zero_stage 2 --lora_rank 16 --actor_learning_rate 2e-3"),
    "together_offload": Case(1, f"{TOGETHER} --zero_stage 2 --adam_offload"),
    "together_2_zero3": Case(2, f"{TOGETHER} --zero_stage 3 --actor_num_gpus_per_node 2 --vllm_num_engines 2"),
    "together_2_lora_zero3": Case(
        2,
        f"{TOGETHER} --zero_stage 3 --actor_num_gpus_per_node 2 --vllm_num_engines 2 --lora_rank 16"
        " --actor_learning_rate 2e-3",
    ),
    "together_2_tp2": Case(
        2, f"{TOGETHER} --zero_stage 2 --actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    ),
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


def command(folder: Path, name: str, steps: int, seed: int) -> list[str]:
    """The demo's RL command in another placement, in bf16, with folders of its own."""
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
    return [*line, *flags, "--check_weight_sync", "--max_steps", str(steps)]


def run_case(folder: Path, name: str, steps: int, seed: int, devices: list[int]) -> dict[str, Any]:
    """Run a case on these GPUs; its figures, or its error."""
    own = folder / name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    visible = ",".join(map(str, devices))
    environment = {**os.environ, "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1"}
    started = time.time()
    with open(own / "out.log", "w") as log:
        try:
            line = command(folder, name, steps, seed)
            done = subprocess.run(line, stdout=log, stderr=log, env=environment, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {SECONDS} s"}
    if done.returncode:
        return {"error": (own / "out.log").read_text()[-1500:]}
    records = [json.loads(line) for line in (own / "run/metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["kind"] == "train"]
    rewards = [record["reward"] for record in train]
    return {
        "first": sum(rewards[:ENDS]) / len(rewards[:ENDS]),
        "last": sum(rewards[-ENDS:]) / len(rewards[-ENDS:]),
        "tensors": sum(record["sync/compared_tensors"] for record in train),
        "differing": sum(record["sync/differing_elements"] for record in train),
        "transfer": sum(record["timing/sync_transfer"] for record in train) / len(train),
        "first_step": train[0]["time"] - started,
        "step": (train[-1]["time"] - train[0]["time"]) / max(1, len(train) - 1),
    }


def run_cases(folder: Path, names: list[str], gpus: int, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """All cases, as many at once as there are GPUs for."""
    results: dict[str, dict[str, Any]] = {}
    free, changed = list(range(gpus)), threading.Condition()

    def work(name: str, devices: list[int]) -> None:
        result = run_case(folder, name, steps, seed, devices)
        with changed:
            results[name] = result
            free.extend(devices)
            changed.notify_all()
        print(f"{name}: {json.dumps(result)}", flush=True)

    threads = []
    for name in sorted(names, key=lambda n: -CASES[n].gpus):
        with changed:
            changed.wait_for(lambda needed=CASES[name].gpus: len(free) >= needed)  # type: ignore[misc]
            devices = [free.pop(0) for _ in range(CASES[name].gpus)]
        threads.append(threading.Thread(target=work, args=(name, devices)))
        threads[-1].start()
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/placements"))
    options = parser.parse_args()
    names = options.cases or [name for name, case in CASES.items() if case.gpus <= options.gpus]
    prepare(options.out, options.seed)
    results = run_cases(options.out, names, options.gpus, options.steps, options.seed)
    return report(options.out, {name: results[name] for name in names}, options.steps >= 4 * ENDS)


if __name__ == "__main__":
    sys.exit(main())
