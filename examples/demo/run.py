"""The demo: a tiny model learns sums from a careless teacher (SFT), then unlearns the mistakes (RL).

Use: make demo, or python examples/demo/run.py [--seed N] [--out FOLDER]

Both stages are the command lines that a user types; each is printed before it runs. At the end: accuracy on
held-out problems before SFT, after SFT and after RL, and the reward curve, also in FOLDER/reward_curve.png.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from curve import read_metric, save_png, text_curve
from task import CHARACTERS, write_data

HERE = Path(__file__).resolve().parent
SFT_ROWS, SFT_BATCH = 16384, 32
RL_PROMPTS, RL_STEPS = 32, 40
HELD_OUT = 200
SFT_SECONDS, RL_SECONDS = 600, 900
"""How long a stage may take before it is ended with an error."""


def sft_command(folder: Path, seed: int) -> list[str]:
    """The supervised stage: one pass over the teacher's answers."""
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_sft"),
        *("--pretrain", f"{folder}/model", "--save_path", f"{folder}/sft", "--ckpt_path", f"{folder}/ckpt_sft"),
        *("--dataset", f"{folder}/data/sft.jsonl", "--input_key", "input", "--output_key", "output"),
        *("--input_template", "{}", "--max_len", "16"),
        *("--train_batch_size", str(SFT_BATCH), "--micro_train_batch_size", str(SFT_BATCH), "--max_epochs", "1"),
        *("--learning_rate", "1e-3", "--lr_warmup_ratio", "0.05"),
        *("--zero_stage", "0", "--param_dtype", "fp32", "--packing_samples"),
        *("--logging_steps", "50", "--seed", str(seed)),
    ]


def rl_command(folder: Path, seed: int) -> list[str]:
    """The reinforcement stage: GRPO with a reward of one line, one vLLM engine and one trainer."""
    samples = RL_PROMPTS * 8
    return [
        *(sys.executable, "-m", "openrlhf.cli.train_ppo_ray"),
        *("--pretrain", f"{folder}/sft", "--save_path", f"{folder}/rl", "--ckpt_path", f"{folder}/ckpt_rl"),
        *("--prompt_data", f"{folder}/data/rl.jsonl", "--input_key", "input", "--label_key", "answer"),
        *("--remote_rm_url", str(HERE / "reward_func.py")),
        *("--advantage_estimator", "group_norm", "--n_samples_per_prompt", "8", "--init_kl_coef", "0"),
        *("--rollout_batch_size", str(RL_PROMPTS), "--train_batch_size", str(samples)),
        *("--micro_train_batch_size", str(samples), "--micro_rollout_batch_size", str(samples)),
        *("--max_len", "16", "--max_new_tokens", "4"),
        *("--actor_learning_rate", "2e-4", "--lr_warmup_ratio", "0.05"),
        *("--actor_num_gpus_per_node", "1", "--vllm_num_engines", "1", "--colocate_all_models", "--enforce_eager"),
        *("--vllm_gpu_memory_utilization", "0.3"),
        *("--zero_stage", "0", "--param_dtype", "fp32", "--packing_samples"),
        *("--run_dir", f"{folder}/run_rl", "--seed", str(seed)),
    ]


def run_demo(folder: Path, seed: int) -> dict[str, float]:
    """Make model and data in `folder`, run both stages, and measure.

    Returns:
        Accuracy on the held-out problems by stage: "before SFT", "after SFT", "after RL".

    Raises:
        SystemExit: a stage failed or took too long; its own output says why.
    """
    from openrlhf import platform

    platform.prepare_process(threads=1)
    from evaluate import accuracy

    prepare(folder, seed)
    say("3/4", "reinforcement learning on the same kind of problems, rewarded for right answers only")
    run_stage(rl_command(folder, seed), RL_SECONDS)
    say("4/4", f"measuring on {HELD_OUT} problems that neither stage has seen")
    stages = {"before SFT": "model", "after SFT": "sft", "after RL": "rl"}
    return {name: accuracy(folder / saved, folder / "data/held_out.jsonl") for name, saved in stages.items()}


def prepare(folder: Path, seed: int) -> None:
    """Everything before the RL stage: model, data and supervised fine-tuning, in an emptied `folder`."""
    from openrlhf.utils.tiny_model import make_tiny_model

    if folder.exists():
        shutil.rmtree(folder)
    say("1/4", f"making a model with random weights, and the problems, in {folder}")
    write_data(folder / "data", seed, SFT_ROWS, RL_PROMPTS * RL_STEPS, HELD_OUT)
    make_tiny_model(
        *(folder / "model", "llama", CHARACTERS, seed),
        **{"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4, "tie": True, "intermediate_size": 384},
    )
    say("2/4", "supervised fine-tuning on the answers of a teacher who often forgets to carry")
    run_stage(sft_command(folder, seed), SFT_SECONDS)


def run_stage(command: list[str], seconds: int) -> None:
    """Print a command and run it; ends the demo if it fails or is not done in time."""
    print("$ " + shlex.join(["python", *command[1:]]), flush=True)
    # One thread a process: the model is too small to gain from more, and loses a lot where cores are busy.
    defaults = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    # Never a Ray cluster that happens to run on this machine.
    environment = {**defaults, **os.environ, "RAY_ADDRESS": "local"}
    process = subprocess.Popen(command, env=environment)
    try:
        status = process.wait(seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        # It ends its own engines and trainers when asked.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if isinstance(stop, KeyboardInterrupt):
            raise
        sys.exit(f"demo: {command[2]} was not done after {seconds} s")
    if status:
        sys.exit(f"demo: {command[2]} ended with exit status {status}")


def say(step: str, text: str) -> None:
    print(f"\n[{step}] {text}", flush=True)


def report(folder: Path, accuracies: dict[str, float], seconds: float) -> None:
    """Print the curve and the table, and save the curve as a PNG."""
    steps, rewards = read_metric(folder / "run_rl" / "metrics.jsonl", "reward")
    save_png(steps, rewards, folder / "reward_curve.png", "mean reward")
    print(f"\nmean reward over {len(steps)} steps of RL (sampled answers)\n\n{text_curve(rewards)}\n")
    print(f"held-out accuracy (greedy, {HELD_OUT} problems)")
    for name, value in accuracies.items():
        print(f"  {name:<12}{value:6.1%}  {'#' * round(40 * value)}")
    lift = accuracies["after RL"] - accuracies["after SFT"]
    print(f"\nRL lifted accuracy by {100 * lift:+.1f} points in {seconds:.0f} s. Curve: {folder}/reward_curve.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the model, the data and both stages")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for everything it makes")
    args = parser.parse_args()
    started = time.monotonic()
    accuracies = run_demo(args.out, args.seed)
    report(args.out, accuracies, time.monotonic() - started)


if __name__ == "__main__":
    main()
