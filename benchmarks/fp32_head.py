"""How far engine and trainer are apart in 16 bits, without and with --fp32_lm_head, on samples of a model's own.

    python benchmarks/fp32_head.py --model FOLDER --prompts FILE [--json FILE] [-- more train_ppo_ray flags]

One step of train_ppo_ray each. The file has chats in "prompt" and texts in "answer", as examples/smollm2/make_data.py
writes them; whether a response is right does not matter here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from hybrid_step import REWARD, card, train_records, versions

WAYS = {"16-bit logits": [], "float32 logits": ["--fp32_lm_head"]}
SHOWN = ("logprobs_diff", "effective_sample_size", "sync/logprob_diff_mean", "timing/generation", "timing/ppo_train")


def step(options: argparse.Namespace, folder: Path, more: list[str]) -> dict[str, float]:
    """The metrics of the first step of a run."""
    reward, out = folder / "reward.py", Path(tempfile.mkdtemp(dir=folder))
    reward.write_text(REWARD)
    batch = options.prompt_count * options.samples
    flags = f"""
        --pretrain {options.model} --prompt_data {options.prompts} --input_key prompt --label_key answer
        --apply_chat_template --remote_rm_url {reward} --advantage_estimator reinforce_baseline --init_kl_coef 0
        --n_samples_per_prompt {options.samples} --rollout_batch_size {options.prompt_count} --train_batch_size {batch}
        --use_dynamic_batch --train_max_tokens_per_gpu 4096 --packing_samples
        --max_len 1024 --max_new_tokens {options.new_tokens} --param_dtype bf16 --enable_vllm_is_correction
        --actor_num_gpus_per_node 1 --vllm_num_engines 1 --max_steps 1 --save_path {out / "model"}
        --ckpt_path {out / "ckpt"} --run_dir {out / "run"}
    """.split()
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags, *more, *options.more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return train_records(out / "run")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--prompt_count", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="of each prompt")
    parser.add_argument("--new_tokens", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("more", nargs="*", help="further train_ppo_ray flags, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {way: step(options, Path(folder), more) for way, more in WAYS.items()}
    stack = versions("vllm", "torch")
    if options.json:
        options.json.write_text(json.dumps({"card": card(), "versions": stack, "steps": found}, indent=1))
    print(f"\n{card()}, {options.model.name}, bf16, {stack}")
    print(f"{'':<24}" + "".join(f"{way:>18}" for way in WAYS))
    for name in SHOWN:
        print(f"{name:<24}" + "".join(f"{found[way][name]:18.4f}" for way in WAYS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
