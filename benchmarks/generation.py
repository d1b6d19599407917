"""Seconds of a rollout against vLLM alone, with the same model, prompts and sampling options, on one GPU, in one run.

    python benchmarks/generation.py --size 1.5b --steps 3 --json out.json

"alone" is vLLM's offline ``LLM.generate`` in a process of its own: each prompt eight times, without text. "rollouts"
are those of train_ppo_ray --rollout_only, which makes trajectories of the same samples and rewards them. "alone" is
taken before and after them, since the same batch differs by a fifth between moments and processes of one machine. The
first batch of each start warms up and is left out. 64 prompts of 128 tokens, 8 samples of 512 new tokens each. With
--logprobs both give the log-prob of each token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybrid_step import NEW_TOKENS, PROMPT_TOKENS, PROMPTS, REWARD, SAMPLES, card, train_records, versions
from make_model import SIZES, make_model, make_prompts


def alone(options: argparse.Namespace, model: Path, prompts: Path) -> list[float]:
    """Seconds of each batch; runs in a process of its own."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["input"] for line in prompts.read_text().splitlines()]
    llm = LLM(str(model), dtype="bfloat16", gpu_memory_utilization=options.gpu_memory_utilization,
              max_model_len=1024, enable_prefix_caching=False, seed=1)  # fmt: skip
    logprobs = 0 if options.logprobs else None  # 0: those of the sampled tokens
    sampling = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=NEW_TOKENS, detokenize=False, logprobs=logprobs)
    seconds = []
    for step in range(options.steps + 1):
        texts = rows[step * PROMPTS : (step + 1) * PROMPTS]
        inputs = [{"prompt_token_ids": tokenizer(text)["input_ids"]} for text in texts]
        started = time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        print(f"alone: {tokens} tokens in {seconds[-1]:.2f} s", flush=True)
    return seconds


def alone_in_a_process(options: argparse.Namespace) -> list[float]:
    """:func:`alone` in a process of its own, which gives the GPU back."""
    answer = options.work / f"alone_{time.time_ns()}.json"
    subprocess.run([sys.executable, __file__, "--alone", str(answer), *sys.argv[1:]], check=True)
    return json.loads(answer.read_text())


def rollouts(options: argparse.Namespace, model: Path, prompts: Path, folder: Path) -> list[float]:
    """Seconds of each rollout of train_ppo_ray."""
    reward, out = folder / "reward.py", folder / f"rollouts_{time.time_ns()}"
    reward.write_text(REWARD)
    flags = f"""
        --pretrain {model} --prompt_data {prompts} --input_key input --label_key answer --remote_rm_url {reward}
        --rollout_only --dump_rollouts {out / "dump"} --actor_num_gpus_per_node 1 --vllm_num_engines 1
        --vllm_gpu_memory_utilization {options.gpu_memory_utilization} --advantage_estimator reinforce_baseline
        --n_samples_per_prompt {SAMPLES} --rollout_batch_size {PROMPTS} --train_batch_size {PROMPTS * SAMPLES}
        --micro_train_batch_size 1 --micro_rollout_batch_size 1 --max_len 1024 --max_new_tokens {NEW_TOKENS}
        --param_dtype bf16 --max_steps {options.steps + 1} --run_dir {out / "run"} --ckpt_path {out / "ckpt"}
    """.split()
    if options.logprobs:
        flags.append("--enable_vllm_is_correction")
    subprocess.run([sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags, *options.more], check=True)
    return [record["timing/generation"] for record in train_records(out / "run")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpu_memory_utilization", type=float, default=0.6)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "openrlhf_bench")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="further train_ppo_ray flags, after --")
    options = parser.parse_args()
    model, prompts = options.work / options.size, options.work / "generation.jsonl"
    if options.alone:
        options.alone.write_text(json.dumps(alone(options, model, prompts)))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    make_model(options.size, model)
    make_prompts(prompts, 1024, PROMPT_TOKENS)
    before = alone_in_a_process(options)
    measured = rollouts(options, model, prompts, options.work)
    cases = {"alone": before[1:] + alone_in_a_process(options)[1:], "rollouts": measured[1:]}
    stack = versions("vllm", "torch", "ray")
    means = {name: sum(seconds) / len(seconds) for name, seconds in cases.items()}
    if options.json:
        report = {"card": card(), "size": options.size, "versions": stack, "seconds": cases, "means": means}
        options.json.write_text(json.dumps(report, indent=1))
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    what = f"{PROMPTS} x {SAMPLES} samples of {NEW_TOKENS} tokens{', log-probs' if options.logprobs else ''}"
    print(f"\n{card()}, {options.size}, {stack}: {what}")
    for name, seconds in cases.items():
        each = " ".join(f"{s:.2f}" for s in seconds)
        print(f"  {name:<9} {means[name]:6.2f} s ({each})  {tokens / means[name]:8.0f} tokens/s")
    print(f"  ratio     {means['rollouts'] / means['alone']:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
