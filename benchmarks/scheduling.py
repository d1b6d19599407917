"""Microseconds a token that an engine's scheduler takes, beside vLLM's own: the part of a decode step that is Python's.

    python benchmarks/scheduling.py [--requests 512] [--tokens 256] [--rounds 3] [--json FILE]

No model runs: each scheduled request gets a token at once, with a step scheduled ahead as on a GPU. A GPU that needs
less for a step than its scheduler waits for it. Responses that are all of one length, with and without log-probs,
without prefix caching; in turns, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_step import card, versions

PROMPT_TOKENS = 128
BLOCK = 16


def make_config(model: str, requests: int, tokens: int) -> Any:
    """vLLM's configuration of an engine that runs all requests at once."""
    from vllm import AsyncEngineArgs

    from openrlhf import platform
    from openrlhf.engines.spec import model_arguments

    arguments = model_arguments(model, "fp32", PROMPT_TOKENS + tokens, on_cpu=platform.device_type() == "cpu")
    batch = {"max_num_seqs": requests, "max_num_batched_tokens": requests * (PROMPT_TOKENS + tokens)}
    config = AsyncEngineArgs(**arguments | batch | {"enable_prefix_caching": False}).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = requests * (-(-(PROMPT_TOKENS + tokens) // BLOCK)) + 1
    return config


def make_vllms_or_ours(config: Any, ours: bool) -> Any:
    """A scheduler with a cache for a model of one layer."""
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from openrlhf.engines.final_outputs import make_scheduler

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    make = make_scheduler if ours else AsyncScheduler
    grammars = StructuredOutputManager(config)
    return make(vllm_config=config, kv_cache_config=cache, structured_output_manager=grammars, block_size=BLOCK)


def sample(scheduled: Any, logprobs: bool) -> Any:
    """A token for each scheduled request."""
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    rows = len(names)
    made = LogprobsLists(np.zeros((rows, 1), np.int32), np.zeros((rows, 1), np.float32), np.zeros(rows))
    where = {name: row for row, name in enumerate(names)}
    return ModelRunnerOutput(names, where, [[7] for _ in names], logprobs=made if logprobs else None)


def measure(config: Any, options: argparse.Namespace, ours: bool, logprobs: bool) -> tuple[float, float]:
    """Microseconds a token of scheduling a step, and of taking in its tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.request import Request

    scheduler = make_vllms_or_ours(config, ours)
    sampling = SamplingParams(max_tokens=options.tokens, logprobs=0 if logprobs else None, ignore_eos=True,
                              detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)  # fmt: skip
    for name in range(options.requests):
        scheduler.add_request(Request(str(name), [5] * PROMPT_TOKENS, sampling, None))
    under_way: deque[Any] = deque()
    scheduling = taking_in = 0.0
    while scheduler.has_unfinished_requests():
        started = time.perf_counter()
        scheduled = scheduler.schedule()
        scheduling += time.perf_counter() - started
        under_way.append((scheduled, sample(scheduled, logprobs)))
        if len(under_way) == 2:  # noqa: PLR2004
            step = under_way.popleft()
            started = time.perf_counter()
            scheduler.update_from_output(*step)
            taking_in += time.perf_counter() - started
    each = 1e6 / (options.requests * options.tokens)
    return scheduling * each, taking_in * each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from openrlhf.utils.tiny_model import make_tiny_model

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model"))
        config = make_config(model, options.requests, options.tokens)
        for logprobs in (False, True):
            taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(options.rounds):
                for ours in taken:
                    taken[ours].append(measure(config, options, ours, logprobs))
            for ours, each in taken.items():
                scheduling, taking_in = (statistics.median(part) for part in zip(*each, strict=True))
                rows.append({"ours": ours, "logprobs": logprobs, "scheduling": scheduling, "taking_in": taking_in})
    stack = versions("vllm", "torch")
    if options.json:
        options.json.write_text(json.dumps({"card": card(), "versions": stack, "rows": rows}, indent=1))
    print(f"{card()}, {stack}: {options.requests} requests of {options.tokens} tokens, us a token")
    print(f"{'':<22}{'log-probs':>10}{'scheduling':>12}{'taking in':>11}{'together':>10}")
    for row in rows:
        whose = "an engine of ours" if row["ours"] else "vLLM, AsyncScheduler"
        print(
            f"{whose:<22}{'yes' if row['logprobs'] else 'no':>10}"
            f"{row['scheduling']:>12.2f}{row['taking_in']:>11.2f}{row['scheduling'] + row['taking_in']:>10.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
