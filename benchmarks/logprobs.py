"""Log-probs from hidden states: all logits at once against chunk by chunk; and padded against packed steps.

    python benchmarks/logprobs.py [--json out.json]

First table: forward and backward of the language-model head and log-softmax at 2k, 8k and 32k tokens x 152k
vocabulary. Each case runs in a process of its own; the peak is what the case adds to the memory that its inputs and
weights take (GPU: allocated; CPU: resident). A dense case that needs more memory than there is is named, not run.
Second table: a training step of a small model over sequences of very different lengths, as padded rows and packed, in
micro-batches of at most the same number of tokens; the real tokens are the same. States card and versions.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

VOCABULARY = 151_936
TOKENS = (2_048, 8_192, 32_768)
SKEWED = (1900, 40, 60, 35, 700, 50, 45, 80, 30, 55, 1200, 65, 70, 90, 25, 38)
"""Lengths as of rollouts: a few long answers, many short ones."""
GIB = 2**30


def on_gpu() -> bool:
    """Whether the cases run on a GPU."""
    return torch.cuda.is_available()


def seconds_of(function: Callable[[], None], repeats: int) -> float:
    """Fastest of several runs, after one that is not counted."""
    times = []
    for index in range(repeats + 1):
        if on_gpu():
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if on_gpu():
            torch.cuda.synchronize()
        if index:
            times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes() -> int:
    """Most memory this process has had so far."""
    return torch.cuda.max_memory_allocated() if on_gpu() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def dense(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """All logits at once, in float32 as usual."""
    logits = head(hidden).float()
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def chunked(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """What the trainers do."""
    from openrlhf.models.head import HeadScaling, head_logprobs

    return head_logprobs(head, hidden, targets, 1.0, False, HeadScaling())[0]


def head_case(way: str, tokens: int, width: int, repeats: int) -> dict[str, float]:
    """Seconds and peak memory of one forward and backward pass."""
    device = "cuda" if on_gpu() else "cpu"
    dtype = torch.bfloat16 if on_gpu() else torch.float32
    torch.manual_seed(0)
    head = nn.Linear(width, VOCABULARY, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    function = {"dense": dense, "chunked": chunked}[way]
    chunked(head, hidden[:2], targets[:2])  # imports and kernels
    before = torch.cuda.memory_allocated() if on_gpu() else psutil.Process().memory_info().rss

    def step() -> None:
        hidden.grad = head.weight.grad = None
        function(head, hidden, targets).sum().backward()

    seconds = seconds_of(step, repeats)
    return {"seconds": seconds, "peak_gib": (peak_bytes() - before) / GIB}


def dense_bytes(tokens: int) -> int:
    """Memory of the dense way: float32 logits, their log-softmax and its gradient (and bf16 logits on a GPU)."""
    return tokens * VOCABULARY * (3 * 4 + (2 if on_gpu() else 0))


def free_bytes() -> int:
    """Memory that a case may take."""
    return torch.cuda.mem_get_info()[0] if on_gpu() else psutil.virtual_memory().available


def packing_case(way: str, repeats: int) -> dict[str, float]:
    """Seconds of a step over :data:`SKEWED` in micro-batches of at most 4096 token positions."""
    import tempfile

    from openrlhf.batching import pack
    from openrlhf.batching.plan import plan_micro_batches
    from openrlhf.config.parser import parse_cli
    from openrlhf.models.loading import load_causal_lm
    from openrlhf.models.logprobs import PolicyModel
    from openrlhf.utils.tiny_model import make_tiny_model

    cap = 4096
    with tempfile.TemporaryDirectory() as scratch:
        shape: dict[str, Any] = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "tie": True}
        folder = make_tiny_model(Path(scratch) / "model", "qwen3", **shape)
        flags = f"--pretrain {folder} --dataset {folder} --max_len {cap} --param_dtype {'bf16' if on_gpu() else 'fp32'}"
        flags += " --packing_samples" if way == "packed" else ""
        model = PolicyModel(load_causal_lm(folder, parse_cli("train_sft", flags.split())), packing=way == "packed")
    device = "cuda" if on_gpu() else "cpu"
    model.to(device).train()
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    sequences = [torch.randint(3, vocabulary, (length,), generator=generator) for length in SKEWED]
    if way == "packed":
        batches = plan_micro_batches(list(SKEWED), 1, max_tokens=cap)[0]
    else:
        rows = cap // max(SKEWED)
        batches = [list(range(i, min(i + rows, len(SKEWED)))) for i in range(0, len(SKEWED), rows)]
    packs = [pack(sequences, {}, list(indices)).to(device) for indices in batches]

    def step() -> None:
        for batch in packs:
            (-model(batch).logprobs.sum() / sum(SKEWED)).backward()
        model.zero_grad()

    return {"seconds": seconds_of(step, repeats), "micro_batches": len(packs)}


def run_case(name: list[str]) -> dict[str, float]:
    """A case in a process of its own, so that peaks don't mix."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", *name], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        sys.exit(f"case {' '.join(name)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def head_table(width: int, repeats: int) -> list[dict[str, Any]]:
    """One row for each number of tokens."""
    print(f"\nhead and log-softmax, hidden size {width}, vocabulary {VOCABULARY}, forward and backward")
    print(f"{'tokens':>8} {'dense s':>9} {'GiB':>7} {'chunked s':>10} {'GiB':>7} {'dense/chunked time':>19}")
    rows = []
    for tokens in TOKENS:
        row: dict[str, Any] = {
            "tokens": tokens,
            "chunked": run_case(["chunked", str(tokens), str(width), str(repeats)]),
        }
        left = f"{'does not':>9} {'fit':>7}"
        ratio = ""
        if dense_bytes(tokens) < 0.9 * free_bytes():
            row["dense"] = run_case(["dense", str(tokens), str(width), str(repeats)])
            left = f"{row['dense']['seconds']:9.3f} {row['dense']['peak_gib']:7.2f}"
            ratio = f"{row['dense']['seconds'] / row['chunked']['seconds']:.2f}"
        right = f"{row['chunked']['seconds']:10.3f} {row['chunked']['peak_gib']:7.2f}"
        print(f"{tokens:8d} {left} {right} {ratio:>19}", flush=True)
        rows.append(row)
    return rows


def packing_table(repeats: int) -> dict[str, Any]:
    """Padded and packed step times."""
    figures = {way: run_case([way, str(repeats)]) for way in ("padded", "packed")}
    print(f"\ntraining step over {len(SKEWED)} sequences, {sum(SKEWED)} tokens, longest {max(SKEWED)}")
    for way, row in figures.items():
        print(f"{way:>8}: {row['seconds']:.3f} s in {int(row['micro_batches'])} micro-batches")
    print(f"padded / packed: {figures['padded']['seconds'] / figures['packed']['seconds']:.2f}")
    return figures


def main() -> int:
    """Run all cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=1536 if on_gpu() else 256)
    parser.add_argument("--repeats", type=int, default=5 if on_gpu() else 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        way, *numbers = options.case
        case = packing_case if way in ("padded", "packed") else head_case
        print(json.dumps(case(way, *(int(n) for n in numbers))))
        return 0
    card = torch.cuda.get_device_name() if on_gpu() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{card}; torch {torch.__version__}")
    figures = {"card": card, "head": head_table(options.hidden_size, options.repeats)}
    figures["packing"] = packing_table(options.repeats)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
