"""Seconds of a weight sync: sizes of models x ZeRO stages x tensor parallelism x transports, on train_ppo_ray itself.

    python benchmarks/weight_sync.py --gpus 2 [--sizes 1.5b 7b] [--steps 5] [--check] [CASE ...]

Each case is a run of a few tiny steps of a random model of a real shape. Printed are the means over the syncs after the
first: "transfer" is what the policy's workers take to hand the weights to the engines until these can use them, "cycle"
is the whole sync with what surrounds it (sleep, wake, room for the cache). With --check every tensor is compared after
each sync, and the run ends with an error if an element differs. Cases for more GPUs than --gpus are left out.
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
from typing import Any, NamedTuple

from hybrid_step import REWARD, card, train_records, versions
from make_model import SIZES, make_model, make_prompts

SECONDS = 500
PROMPTS = 8
TOGETHER = "--colocate_all_models --vllm_enable_sleep --deepspeed_enable_sleep"


class Case(NamedTuple):
    """GPUs that a case takes, and its flags."""

    gpus: int
    flags: str


def _case(transport: str, zero_stage: int, actors: int, engines: int, tensor_parallel: int, more: str = "") -> Case:
    placement = TOGETHER if transport == "ipc" else ""
    flags = (
        f"{placement} --zero_stage {zero_stage} --actor_num_gpus_per_node {actors} --vllm_num_engines {engines} "
        f"--vllm_tensor_parallel_size {tensor_parallel} {more}"
    )
    return Case(actors if transport == "ipc" else actors + engines * tensor_parallel, flags)


CASES = {
    "ipc_zero2": _case("ipc", 2, 1, 1, 1),
    "ipc_zero2_lora": _case("ipc", 2, 1, 1, 1, "--lora_rank 16"),
    "ipc_zero3_2": _case("ipc", 3, 2, 2, 1),
    "ipc_zero3_2_tp2": _case("ipc", 3, 2, 1, 2),
    "nccl_zero2": _case("nccl", 2, 1, 1, 1),
    "nccl_zero3_2": _case("nccl", 3, 2, 2, 1),
    "nccl_zero3_2_tp2": _case("nccl", 3, 2, 1, 2),
    "gloo_zero2": _case("gloo", 2, 1, 1, 1, "--vllm_sync_backend gloo"),
}


def run_case(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case; its figures, or its error."""
    out = options.work / f"{model.name}_{name}_{time.time_ns()}"
    flags = f"""
        --pretrain {model} --prompt_data {options.work / "weight_sync.jsonl"} --input_key input --label_key answer
        --remote_rm_url {options.work / "reward.py"} --advantage_estimator reinforce_baseline --init_kl_coef 0
        --n_samples_per_prompt 2 --rollout_batch_size {PROMPTS} --train_batch_size {2 * PROMPTS}
        --micro_train_batch_size 2 --micro_rollout_batch_size 2 --max_len 256 --max_new_tokens 16 --param_dtype bf16
        --packing_samples --gradient_checkpointing --enforce_eager --vllm_gpu_memory_utilization 0.5
        --vllm_kv_cache_gib 2 --max_steps {options.steps} --run_dir {out / "run"} --ckpt_path {out / "ckpt"}
        --save_path {out / "model"} {CASES[name].flags}
    """.split()
    if options.check:
        flags.append("--check_weight_sync")
    devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))).split(",")
    visible = ",".join(devices[: CASES[name].gpus])
    environment = {**os.environ, "RAY_ADDRESS": "local", "CUDA_VISIBLE_DEVICES": visible, "HF_HUB_OFFLINE": "1"}
    out.mkdir(parents=True)
    with open(out / "out.log", "w") as log:
        command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags]
        try:
            done = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {SECONDS} s"}
    if done.returncode:
        return {"error": (out / "out.log").read_text()[-1500:]}
    steps = train_records(out / "run")
    steady = steps[1:] or steps

    def mean(metric: str) -> float:
        return sum(step.get(metric, 0.0) for step in steady) / len(steady)

    return {
        "transfer": mean("timing/sync_transfer"),
        "cycle": mean("timing/broadcast"),
        "tensors": sum(step.get("sync/compared_tensors", 0) for step in steps),
        "differing": sum(step.get("sync/differing_elements", 0) for step in steps),
        "logprob_diff": mean("sync/logprob_diff_mean"),
    }


def gib(model: Path) -> float:
    """GiB of weights in a folder."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE", help="all that fit, if not given")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["1.5b"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare every tensor after each sync")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "openrlhf_bench")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "reward.py").write_text(REWARD)
    make_prompts(options.work / "weight_sync.jsonl", PROMPTS * options.steps, 64)
    stack = versions("vllm", "torch", "deepspeed", "ray")
    results: dict[str, dict[str, Any]] = {}
    for size in options.sizes:
        make_model(size, options.work / size)
        for name in options.cases or [name for name, case in CASES.items() if case.gpus <= options.gpus]:
            results[f"{size} {name}"] = run_case(name, options.work / size, options)
            print(f"{size} {name}: {json.dumps(results[f'{size} {name}'])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"card": card(), "versions": stack, "cases": results}, indent=1))
    print(f"\n{options.gpus} x {card()}, {stack}")
    print(f"{'case':<26}{'weights':>10}{'transfer':>10}{'cycle':>9}{'tensors':>9}{'differ':>8}")
    failed = False
    for name, result in results.items():
        if "error" in result:
            failed = True
            print(f"{name:<26}FAILED: {result['error'].strip().splitlines()[-1][:160]}")
            continue
        weights = gib(options.work / name.split()[0])
        print(f"{name:<26}{weights:>6.2f} GiB{result['transfer']:>8.3f} s{result['cycle']:>7.3f} s"
              f"{result['tensors']:>9.0f}{result['differing']:>8.0f}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
