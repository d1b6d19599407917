"""Throughput and final accuracy of asynchronous against synchronous training, on the demo's task with a slow reward.

    python benchmarks/async_training.py [--sleep 2.0] [--seeds 0] [--out runs/async] [--queue_size 2] [--drain]

The demo's supervised model is trained twice with the same prompts, seeds and flags: once as it is, once with
--async_train. The reward sleeps, as a judge or a sandbox would keep one waiting. Printed are samples a second (from
the end of the first step to the end of the last), the greedy accuracy on the held-out problems, and the staleness
that the run reports. Ends with status 1 when async is less than 1.5 times as fast, or its mean accuracy more than 3
points below.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples/demo"), str(ROOT)]

from hybrid_step import train_records  # noqa: E402
from run import HELD_OUT, RL_PROMPTS, RL_STEPS, SFT_ROWS, SFT_SECONDS, rl_command, run_stage, sft_command  # noqa: E402
from task import CHARACTERS, write_data  # noqa: E402

LEAST_SPEEDUP = 1.5
MOST_POINTS_LOST = 3.0
RL_SECONDS = 1200
SLOW_REWARD = """
import importlib.util
import time

spec = importlib.util.spec_from_file_location("demo_reward", {path!r})
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)


def reward_func(queries, prompts, labels, **kwargs):
    time.sleep({seconds})
    return demo.reward_func(queries, prompts, labels)
"""


def prepare(folder: Path, seed: int) -> None:
    """The demo's data and supervised model, unless they are there."""
    from openrlhf.utils.tiny_model import make_tiny_model

    if (folder / "sft/config.json").exists():
        return
    write_data(folder / "data", seed, SFT_ROWS, RL_PROMPTS * RL_STEPS, HELD_OUT)
    make_tiny_model(
        *(folder / "model", "llama", CHARACTERS, seed),
        **{"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4, "tie": True, "intermediate_size": 384},
    )
    run_stage(sft_command(folder, seed), SFT_SECONDS)


def reinforce(folder: Path, name: str, seed: int, reward: Path, more: list[str]) -> dict[str, float]:
    """One run of the reinforcement stage.

    Returns:
        "samples_per_second", "accuracy" (0 to 1), "staleness" (mean over the run, in versions) and "stale_groups".
    """
    from evaluate import accuracy

    own = folder / name
    shutil.rmtree(own, ignore_errors=True)
    paths = {"--save_path": own / "model", "--ckpt_path": own / "ckpt", "--run_dir": own / "run"}
    command = rl_command(folder, seed)
    for flag, value in {**paths, "--remote_rm_url": reward}.items():
        command[command.index(flag) + 1] = str(value)
    command.remove("--colocate_all_models")
    run_stage([*command, "--enable_vllm_is_correction", *more], RL_SECONDS)
    steps = train_records(own / "run")
    seconds = steps[-1]["time"] - steps[0]["time"]
    return {
        "samples_per_second": sum(step["rollout/num_samples"] for step in steps[1:]) / seconds,
        "accuracy": accuracy(own / "model", folder / "data/held_out.jsonl"),
        "staleness": statistics.fmean(step.get("rollout/staleness_mean", 0.0) for step in steps),
        "stale_groups": sum(step.get("rollout/stale_groups", 0.0) for step in steps),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sleep", type=float, default=2.0, help="seconds that a call of the reward sleeps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/async"))
    parser.add_argument("--queue_size", type=int, default=2)
    parser.add_argument("--drain", action="store_true", help="without --partial_rollout")
    options = parser.parse_args()
    flags = ["--async_train", "--async_queue_size", str(options.queue_size)]
    flags += ["--vllm_generate_batch_size", str(RL_PROMPTS * options.queue_size)]
    flags += [] if options.drain else ["--partial_rollout"]
    results: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    for seed in options.seeds:
        folder = (options.out / str(seed)).absolute()
        prepare(folder, seed)
        reward = folder / "slow_reward.py"
        reward.write_text(
            SLOW_REWARD.format(path=str(ROOT / "examples/demo/reward_func.py"), seconds=options.sleep), encoding="utf-8"
        )
        results["sync"].append(reinforce(folder, "sync", seed, reward, []))
        results["async"].append(reinforce(folder, "async", seed, reward, flags))
    print(f"\nreward sleeps {options.sleep:g} s a call; async: {' '.join(flags)}")
    print("seed  mode   samples/s  accuracy  staleness  stale groups")
    for index, seed in enumerate(options.seeds):
        for mode, runs in results.items():
            run = runs[index]
            print(
                f"{seed:>4}  {mode:<5}{run['samples_per_second']:>11.1f}{run['accuracy']:>10.1%}"
                f"{run['staleness']:>11.2f}{run['stale_groups']:>14.0f}"
            )
    means = {
        (mode, name): statistics.fmean(run[name] for run in runs)
        for mode, runs in results.items()
        for name in ("samples_per_second", "accuracy")
    }
    speedup = means["async", "samples_per_second"] / means["sync", "samples_per_second"]
    points = 100 * (means["async", "accuracy"] - means["sync", "accuracy"])
    print(f"async is {speedup:.2f} times as fast; accuracy {points:+.1f} points")
    return 0 if speedup >= LEAST_SPEEDUP and points >= -MOST_POINTS_LOST else 1


if __name__ == "__main__":
    sys.exit(main())
