"""Seconds from launch to the first rollout, with vLLM's core forked from a process that imports it, and spawned.

    python benchmarks/engine_start.py [--size 1.5b] [--rounds 3] [--json FILE]

train_ppo_ray --rollout_only with one engine. "spawned" is vLLM's own way inside Ray, which a user chooses with
VLLM_WORKER_MULTIPROC_METHOD=spawn. The ways take turns; a first start fills the caches of compiled kernels and is left
out. Without --size the model is a tiny one, so that what remains is mostly imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybrid_step import PROMPT_TOKENS, REWARD, card, train_records, versions
from make_model import SIZES, make_model, make_prompts

from openrlhf.engines.core_process import METHOD_VARIABLE
from openrlhf.utils.tiny_model import make_tiny_model

WAYS = {"forked": {}, "spawned": {METHOD_VARIABLE: "spawn"}}


def first_rollout(options: argparse.Namespace, model: Path, folder: Path, way: str) -> float:
    """Seconds from the launch of a run to its first rollout."""
    out = folder / f"{way}_{time.time_ns()}"
    flags = f"""
        --pretrain {model} --prompt_data {folder / "prompts.jsonl"} --input_key input --label_key answer
        --remote_rm_url {folder / "reward.py"} --rollout_only --dump_rollouts {out / "dump"} --vllm_num_engines 1
        --actor_num_gpus_per_node 1 --advantage_estimator reinforce --n_samples_per_prompt 1 --rollout_batch_size 8
        --train_batch_size 8 --micro_train_batch_size 1 --micro_rollout_batch_size 1 --max_len 512 --max_new_tokens 8
        --vllm_kv_cache_gib 1 --max_steps 1 --run_dir {out / "run"} --ckpt_path {out / "ckpt"}
    """.split()
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags, *options.more]
    environment = {name: value for name, value in os.environ.items() if name != METHOD_VARIABLE} | WAYS[way]
    started = time.time()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    first = train_records(out / "run")[0]
    return first["time"] - first["timing/step_total"] - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "openrlhf_bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="further train_ppo_ray flags, after --")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.work / (options.size or "tiny")
    if options.size:
        make_model(options.size, model)
    else:
        make_tiny_model(model)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        make_prompts(Path(folder) / "prompts.jsonl", 8, PROMPT_TOKENS)
        (Path(folder) / "reward.py").write_text(REWARD)
        first_rollout(options, model, Path(folder), "forked")
        for turn in range(options.rounds):
            for way in list(WAYS)[:: -1 if turn % 2 else 1]:
                seconds[way].append(first_rollout(options, model, Path(folder), way))
    means = {way: sum(each) / len(each) for way, each in seconds.items()}
    stack = versions("vllm", "torch", "ray")
    if options.json:
        report = {"card": card(), "size": options.size, "versions": stack, "seconds": seconds, "means": means}
        options.json.write_text(json.dumps(report, indent=1))
    print(f"\n{card()}, {os.cpu_count()} cores, {options.size or 'tiny model'}, {stack}: launch to the first rollout")
    for way, each in seconds.items():
        print(f"  {way:<8} {means[way]:6.1f} s ({' '.join(f'{s:.1f}' for s in each)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
