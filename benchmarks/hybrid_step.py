"""Seconds of a hybrid-engine step by phase: train_ppo_ray on a random model of a real shape.

    python benchmarks/hybrid_step.py --size 1.5b --gpus 1 --steps 4 --json out.json [-- more train_ppo_ray flags]

The reference work: 64 prompts of 128 tokens, 8 samples of 512 new tokens each, reinforce_baseline with a k2 KL loss and
a reference model, bf16, packing, gradient checkpointing, everything on the same GPUs. Other work, for example one
sequence of 32k tokens a prompt: --prompts 4 --samples 2 --prompt_tokens 32000 --new_tokens 512 --max_tokens 32768. The
first step warms up and is left out of the means. Prints a table last; states card and versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_model import SIZES, make_model, make_prompts

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, 8, 128, 512
"""The reference work."""
PHASES = ("timing/generation", "timing/make_experience", "timing/ppo_train", "timing/broadcast", "timing/step_total")

REWARD = '''
import zlib

def reward_func(queries, prompts, labels):
    """A number from 0 to 1 that differs from sample to sample: enough for advantages, free to compute."""
    return {"rewards": [zlib.crc32(query.encode()) % 1000 / 1000 for query in queries]}
'''


def command(options: argparse.Namespace, model: Path, prompts: Path, reward: Path, out: Path) -> list[str]:
    """The train_ppo_ray command line."""
    gpus = str(options.gpus)
    batch = options.train_batch_size or options.prompts * options.samples
    flags = f"""
        --pretrain {model} --prompt_data {prompts} --input_key input --label_key answer --remote_rm_url {reward}
        --actor_num_gpus_per_node {gpus} --ref_num_gpus_per_node {gpus} --vllm_num_engines {gpus}
        --colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep
        --vllm_gpu_memory_utilization {options.gpu_memory_utilization}
        --advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k2 --init_kl_coef 1e-5
        --n_samples_per_prompt {options.samples} --rollout_batch_size {options.prompts} --train_batch_size {batch}
        --micro_train_batch_size 1 --micro_rollout_batch_size 1
        --max_len {max(1024, options.prompt_tokens + options.new_tokens)} --max_new_tokens {options.new_tokens}
        --packing_samples --use_dynamic_batch --train_max_tokens_per_gpu {options.max_tokens}
        --zero_stage {options.zero_stage} --param_dtype bf16
        --max_steps {options.steps} --save_path {out / "model"} --ckpt_path {out / "ckpt"}
    """.split()
    if not options.no_checkpointing:
        flags.append("--gradient_checkpointing")
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags, *options.more]


def card() -> str:
    """Name of the GPU, or "CPU"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions(*names: str) -> dict[str, str]:
    """Version of each package; vLLM's build for CPUs has another name."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = importlib.metadata.version(f"{name}-cpu")
    return found


def train_records(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step that a run has done, none yet perhaps; of a step that was repeated the later ones."""
    path = run_dir / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return list({record["step"]: record for record in records if record["kind"] == "train"}.values())


def training_mfu(options: argparse.Namespace, model: Path, seconds: float) -> float:
    """Model FLOPs utilisation of the training phase: 6 x parameters + attention a token, nothing recomputed."""
    import torch
    from training import active_parameters, peak_flops, step_flops
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        parameters = active_parameters(AutoModelForCausalLM.from_config(shape))
    lengths = [options.prompt_tokens + options.new_tokens] * (options.prompts * options.samples)
    flops = step_flops(shape, parameters, lengths)
    return flops / seconds / (peak_flops(card()) * options.gpus)


def summary(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Means over the steps after the first."""
    steady = metrics[1:] or metrics
    names = [name for name in steady[0] if name.startswith(("timing/", "memory/", "sync/", "rollout/"))]
    return {name: sum(step[name] for step in steady) / len(steady) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--zero_stage", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each prompt")
    parser.add_argument("--prompt_tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new_tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--train_batch_size", type=int, help="all samples of a rollout, if not given")
    parser.add_argument("--max_tokens", type=int, default=16_384)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.6)
    parser.add_argument("--no_checkpointing", action="store_true", help="keep all activations of a micro-batch")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "openrlhf_bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="further train_ppo_ray flags, after --")
    options = parser.parse_args()

    model, out = options.work / options.size, options.work / f"run_{time.time_ns()}"
    out.mkdir(parents=True)
    prompts, reward = out / "prompts.jsonl", out / "reward.py"
    make_model(options.size, model)
    make_prompts(prompts, options.prompts * options.steps, options.prompt_tokens)
    reward.write_text(REWARD)
    started = time.time()
    done = subprocess.run(command(options, model, prompts, reward, out), check=False)
    if done.returncode:
        return done.returncode
    wall = time.time() - started
    lines = train_records(out / "ckpt/run")
    figures = summary(lines)
    startup = lines[0]["time"] - lines[0]["timing/step_total"] - started
    tokens = options.prompts * options.samples * options.new_tokens
    stack = versions("vllm", "torch", "deepspeed", "ray")
    report = {"card": card(), "gpus": options.gpus, "size": options.size, "zero_stage": options.zero_stage,
              "train_batch_size": options.train_batch_size, "versions": stack, "wall_seconds": wall,
              "startup_seconds": startup, "figures": figures, "steps": lines}  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    print(f"\n{options.gpus} x {report['card']}, {options.size}, ZeRO-{options.zero_stage}, {stack}")
    print(f"{options.prompts} prompts of {options.prompt_tokens} tokens x {options.samples} samples of "
          f"{options.new_tokens} new tokens; means of {options.steps - 1} steps")  # fmt: skip
    print(f"  from launch to the first rollout {startup:.0f} s")
    for name in PHASES:
        print(f"  {name.removeprefix('timing/'):<16} {figures[name]:8.2f} s")
    print(f"  generated        {tokens / figures['timing/generation']:8.0f} tokens/s")
    print(f"  MFU of training  {training_mfu(options, model, figures['timing/ppo_train']):8.3f}")
    for name in sorted(figures):
        if name.startswith(("timing/sync_", "sync/", "memory/")):
            print(f"  {name:<32} {figures[name]:.4f}")
    # With a learning rate of 1e-6 the policy stays next to the reference; a large value means broken weights.
    print(f"  {'kl at the last step':<24} {lines[-1]['kl']:.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
