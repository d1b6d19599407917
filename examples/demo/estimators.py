"""The demo's RL stage with every advantage estimator, from the same supervised model, and their curves in one picture.

Use: python examples/demo/estimators.py [--out runs/estimators] [--png CURVES.png] [ESTIMATOR ...]

Prints the mean reward of the first and the last five steps, and the held-out accuracy of each. The settings are the
demo's, tuned for group_norm and for nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from curve import moving_mean, read_metric
from run import RL_SECONDS, prepare, rl_command, run_stage

ENDS = 5
"""Steps at either end that are averaged for the table."""
EXTRA_FLAGS = {
    "gae": "--critic_num_gpus_per_node 1 --critic_learning_rate 1e-3 --lambd 0.95".split(),
    "pass_at_k": "--pass_k 2".split(),
}


def estimator_command(folder: Path, name: str, seed: int) -> list[str]:
    """The demo's RL command with another estimator and folders of its own."""
    own = folder / name
    changed = {
        "--advantage_estimator": name,
        "--save_path": f"{own}/model",
        "--ckpt_path": f"{own}/ckpt",
        "--run_dir": f"{own}/run",
    }
    command = rl_command(folder, seed)
    for flag, value in changed.items():
        command[command.index(flag) + 1] = value
    return [*command, *EXTRA_FLAGS.get(name, [])]


def draw(curves: dict[str, tuple[list[int], list[float]]], path: Path) -> None:
    """The moving means of all curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for name, (steps, rewards) in curves.items():
        axes.plot(steps, moving_mean(rewards), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward (moving mean)")
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    from openrlhf import platform
    from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ESTIMATOR", help="default: all of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    parser.add_argument("--png", type=Path, help="default: curves.png in the folder of --out")
    args = parser.parse_args()
    platform.prepare_process(threads=1)
    from evaluate import accuracy

    if not (args.out / "sft/model.safetensors").exists():
        prepare(args.out, args.seed)
    held_out = args.out / "data/held_out.jsonl"
    rows = [f"{'':<20}{'first steps':>12}{'last steps':>12}{'held out':>10}"]
    rows.append(f"{'after SFT':<20}{'':>12}{'':>12}{accuracy(args.out / 'sft', held_out):>10.1%}")
    curves = {}
    for name in args.names or ADVANTAGE_ESTIMATORS.names():
        if not (args.out / name / "model").exists():  # what an earlier call finished is kept
            run_stage(estimator_command(args.out, name, args.seed), RL_SECONDS)
        curves[name] = steps, rewards = read_metric(args.out / name / "run/metrics.jsonl", "reward")
        first, last = (sum(part) / ENDS for part in (rewards[:ENDS], rewards[-ENDS:]))
        rows.append(f"{name:<20}{first:>12.3f}{last:>12.3f}{accuracy(args.out / name / 'model', held_out):>10.1%}")
        print("\n".join(rows), flush=True)
    draw(curves, args.png or args.out / "curves.png")


if __name__ == "__main__":
    main()
