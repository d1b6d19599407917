"""Seconds of a training step of one model on one GPU: bare, on DeepSpeed, and with the optimizer asleep in between.

    python benchmarks/training.py --size 1.5b --stages 2 3 --checkpointing on half off --json out.json

Each case runs in a process of its own. "bare" is the model's forward and backward pass alone, with the same kernels and
no DeepSpeed: what the training step is compared with. After each step every weight is compared with what it was: Adam
moves none by more than a few learning rates, so a larger change means that weights were lost. MFU counts
6 x parameters + attention, without what is computed again, against the card's dense bf16 peak.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_model import SIZES, make_model, make_prompts

# Dense bf16 FLOP/s by a part of the card's name (NVIDIA's data sheets).
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
LEARNING_RATE = 1e-6


def peak_flops(card: str) -> float:
    """Dense bf16 FLOP/s of a card by its name; NaN if it is not known."""
    return next((value for name, value in PEAKS.items() if name in card), float("nan"))


def step_flops(shape: Any, parameters: int, lengths: list[int]) -> float:
    """Floating-point operations of a forward and backward pass over sequences of these lengths, nothing recomputed."""
    width = shape.num_attention_heads * getattr(shape, "head_dim", shape.hidden_size // shape.num_attention_heads)
    # scores and values, forward and twice that backward; causal masks half of the square
    attention = sum(6 * 2 * shape.num_hidden_layers * width * n * n / 2 for n in lengths)
    return 6.0 * parameters * sum(lengths) + attention


def active_parameters(module: torch.nn.Module) -> int:
    """Parameters at work for a token: all, but of the experts only as many as a token is sent to."""
    config: Any = module.config
    share = config.num_experts_per_tok / config.num_experts if hasattr(config, "num_experts") else 1.0
    sizes = ((name, getattr(p, "ds_numel", p.numel())) for name, p in module.named_parameters())
    return round(sum(size * share if ".experts." in name else size for name, size in sizes))


def timed(function: Callable[[], Any]) -> float:
    """Seconds, with everything on the GPU finished."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class Work:
    """Micro-batches of packed sequences of equal length, and the loss on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from openrlhf.batching import pack

        generator = torch.Generator().manual_seed(0)
        self.lengths = [options.length] * (options.tokens // options.length)
        ids = [torch.randint(4, 250, (n,), generator=generator) for n in self.lengths]
        self.batch = pack(ids, {}, range(len(ids))).to(torch.device("cuda"))
        self.count = options.micro_batches
        self.denominator = float(self.count * sum(self.lengths))

    def run(self, forward: Callable[..., Any], backward: Callable[[torch.Tensor, bool], None]) -> None:
        """One optimizer step's forward and backward passes."""
        for index in range(self.count):
            loss = -forward(self.batch, temperature=1.0).logprobs.sum() / self.denominator
            backward(loss, index == self.count - 1)


def configuration(folder: Path, stage: int, checkpointing: str, more: list[str]) -> Any:
    """The configuration of train_ppo_ray with the flags that the model and its engine read."""
    from openrlhf.config.parser import parse_cli

    argv = f"--pretrain {folder} --prompt_data {folder.parent / 'prompts.jsonl'} --remote_rm_url http://localhost:1"
    argv += " --input_key input --packing_samples --max_len 1024 --actor_num_gpus_per_node 1 --vllm_num_engines 1"
    argv += f" --zero_stage {stage} --param_dtype bf16 --colocate_all_models --deepspeed_enable_sleep"
    argv += {"on": " --gradient_checkpointing", "off": ""}.get(
        checkpointing, " --gradient_checkpointing --gradient_checkpointing_every 2"
    )
    return parse_cli("train_ppo_ray", [*argv.split(), *more])


def bare_case(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Forward alone, and forward with backward, of the model without DeepSpeed."""
    from openrlhf.models.loading import load_causal_lm
    from openrlhf.models.logprobs import PolicyModel

    model = load_causal_lm(str(folder), configuration(folder, 2, options.case_checkpointing, options.more))
    policy = PolicyModel(model).cuda().train()
    work = Work(options)

    def forward_only() -> None:
        with torch.no_grad():
            for _ in range(work.count):
                policy(work.batch)

    def backward(loss: torch.Tensor, last: bool) -> None:
        loss.backward()
        if last:
            policy.zero_grad()

    policy.eval()
    forwards = [timed(forward_only) for _ in range(2)]
    policy.train()
    steps = [timed(lambda: work.run(policy, backward)) for _ in range(options.steps)]
    return {"forward": forwards[-1], "steps": steps, **facts(policy, work, steps)}


def facts(module: Any, work: Work, steps: list[float]) -> dict[str, Any]:
    """MFU and tokens/s of the fastest step after the first, and the memory peak."""
    peak = peak_flops(torch.cuda.get_device_name())
    parameters = active_parameters(module)
    seconds = min(steps[1:] or steps)
    flops = work.count * step_flops(module.config, parameters, work.lengths)
    return {
        "mfu": flops / seconds / peak,
        "tokens_per_second": work.count * sum(work.lengths) / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def engine_case(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of a training engine with its states offloaded and brought back before each."""
    from openrlhf.models.loading import load_causal_lm
    from openrlhf.models.logprobs import PolicyModel
    from openrlhf.workers import deepspeed_engine
    from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine
    from openrlhf.workers.distributed import init_distributed

    # the stage that is named, also 3, which one rank would run as 2
    deepspeed_engine.effective_zero_stage = lambda stage, keep: stage
    init_distributed(timeout_s=120)
    opts = configuration(folder, options.case_stage, options.case_checkpointing, options.more)
    engine = TrainEngine(PolicyModel(load_causal_lm(str(folder), opts)), opts, OptimizerSpec(LEARNING_RATE))
    work = Work(options)

    def weights() -> dict[str, torch.Tensor]:
        return {name: w.float().cpu() for bucket in engine.gathered_parameters() for name, w in bucket}

    def drift(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> dict[str, float]:
        changes = {name: float((after[name] - before[name]).abs().max()) for name in before}
        worst = max(changes, key=lambda name: changes[name])
        return {"largest": changes[worst], "weights": len(changes), "changed": sum(c > 0 for c in changes.values())}

    result: dict[str, Any] = {"steps": [], "offload": [], "reload": [], "sleep_drift": [], "step_drift": []}
    start = before = weights()
    for index in range(options.steps):
        result["offload"].append(timed(engine.offload_states))
        result["asleep_gib"] = torch.cuda.memory_allocated() / 2**30
        result["reload"].append(timed(engine.reload_states))
        result["sleep_drift"].append(drift(before, slept := weights()))
        engine.train()

        def step() -> None:
            work.run(engine, engine.backward)
            result["grad_norm"] = engine.step().grad_norm

        if options.profile and index == options.steps - 1:
            result["steps"].append(profiled(step, f"{options.profile}_{options.case}.txt"))
        else:
            result["steps"].append(timed(step))
        before = weights()
        result["step_drift"].append(drift(slept, before))
    result["total_drift"] = drift(start, before)
    return {**result, **facts(engine.module, work, result["steps"])}


def profiled(function: Callable[[], Any], path: str) -> float:
    """Seconds of a call, with a table of its kernels written to a file."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seconds = timed(function)
    averages = profile.key_averages()
    tables = [averages.table(sort_by=key, row_limit=60, max_name_column_width=90)
              for key in ("self_cuda_time_total", "self_cpu_time_total")]  # fmt: skip
    Path(path).write_text("\n\n".join(tables))
    return seconds


def one_case(options: argparse.Namespace) -> int:
    """Run a case in this process and print its figures as the last line."""
    folder = options.work / options.size
    print(json.dumps((bare_case if options.case == "bare" else engine_case)(folder, options)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--stages", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--checkpointing", choices=("on", "half", "off"), nargs="*", default=["on"])
    parser.add_argument("--tokens", type=int, default=16_384, help="per micro-batch")
    parser.add_argument("--length", type=int, default=640, help="of each sequence")
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", help="beginning of the names of files for tables of kernels")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "openrlhf_bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--case_stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--case_checkpointing", help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="further train_ppo_ray flags, after --")
    options = parser.parse_args()
    if options.case:
        return one_case(options)
    options.work.mkdir(parents=True, exist_ok=True)
    make_model(options.size, options.work / options.size)
    make_prompts(options.work / "prompts.jsonl", 64, 128)
    cases = [("bare", 2, c) for c in options.checkpointing]
    cases += [(f"zero{stage}", stage, c) for stage in options.stages for c in options.checkpointing]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "transformers")}
    print(
        f"{torch.cuda.get_device_name()}, {options.size}, {options.micro_batches} x {options.tokens} tokens, {versions}"
    )
    results, failed = {}, 0
    for case, stage, checkpointing in cases:
        name = f"{case}, checkpointing {checkpointing}"
        flags = ["--case", case, "--case_stage", str(stage), "--case_checkpointing", checkpointing]
        done = subprocess.run([sys.executable, *sys.argv[:1], *flags, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"  {name}: failed with exit status {done.returncode}")
            failed = 1
            continue
        results[name] = result = json.loads(done.stdout.splitlines()[-1])
        print(f"  {name}: steps {' '.join(f'{s:.2f}' for s in result['steps'])} s, {result['tokens_per_second']:.0f} "
              f"tokens/s, MFU {result['mfu']:.3f}, peak {result['peak_gib']:.1f} GiB")  # fmt: skip
        extra = {key: result[key] for key in ("forward", "offload", "reload", "asleep_gib", "sleep_drift", "step_drift",
                                              "total_drift", "grad_norm") if key in result}  # fmt: skip
        print(f"    {json.dumps(extra)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "cases": results}, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
