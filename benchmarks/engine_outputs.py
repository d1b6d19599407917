"""What it costs that vLLM tells its front end of every token, and what an engine saves that tells of whole responses.

    python benchmarks/engine_outputs.py [--requests 256] [--tokens 128] [--rounds 4] [--json FILE]

A model so small that what remains is mostly Python's work for each token of each request, served by vLLM as rollouts
do it (ids in, ids out, final outputs only), with vLLM's own scheduler and with that of an engine
(openrlhf/engines/final_outputs.py), with log-probs of the sampled tokens and a stop string that never comes, and
without. Each case has a process of its own and each is taken twice, in turns; the first batch of a process warms up.
"front end" is the time that the process which runs rewards and agents beside it is at work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hybrid_step import card, versions

WAYS = ("token by token", "whole responses")
CASES = [(logprobs, stop) for stop in (False, True) for logprobs in (False, True)]


async def serve(options: argparse.Namespace, way: str, logprobs: bool, stop: bool) -> list[tuple[float, float]]:
    """Seconds of each batch, and of the front end's processor."""
    from openrlhf import platform
    from openrlhf.engines.spec import engine_environment, model_arguments

    on_cpu = platform.device_type() == "cpu"
    os.environ.update(engine_environment(on_cpu=on_cpu, full_determinism=False))
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from openrlhf.engines.vllm_engine import VLLMEngine
    from openrlhf.rollout.protocol import SamplingParams
    from openrlhf.utils.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        arguments = model_arguments(model, "fp32" if on_cpu else "bf16", 1024, on_cpu=on_cpu)
        arguments |= {"max_num_seqs": options.requests, "enable_prefix_caching": False}
        if way == WAYS[0]:
            del arguments["scheduler_cls"]
        engine = VLLMEngine.__new__(VLLMEngine)
        engine._llm = llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        strings = ("</tool>",) if stop else ()
        sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, logprobs=logprobs, stop=strings)
        own: Any = engine._vllm_sampling(sampling)
        if way == WAYS[0]:
            own.stop, own.detokenize, own.flat_logprobs = list(strings), stop, True

        async def request(name: str) -> None:
            async for _ in llm.generate({"prompt_token_ids": [3, 4, 5, 6]}, own, name):
                pass

        seconds = []
        for batch in range(options.rounds + 1):
            started, worked = time.perf_counter(), time.process_time()
            await asyncio.gather(*(request(f"{batch}-{index}") for index in range(options.requests)))
            seconds.append((time.perf_counter() - started, time.process_time() - worked))
        llm.shutdown()
    return seconds[1:]


def measure(options: argparse.Namespace, way: str, logprobs: bool, stop: bool) -> list[tuple[float, float]]:
    """:func:`serve` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        case = json.dumps([way, logprobs, stop, str(answer)])
        with log.open("w") as output:
            line = [sys.executable, __file__, *sys.argv[1:], "--case", case]
            if subprocess.run(line, stdout=output, stderr=output, timeout=900, check=False).returncode:
                raise RuntimeError(
                    f"{way}, log-probs {logprobs}, stop string {stop}: failed\n{log.read_text()[-4000:]}"
                )
        return json.loads(answer.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        *asked, answer = json.loads(options.case)
        Path(answer).write_text(json.dumps(asyncio.run(serve(options, *asked))))
        return 0
    rows: list[dict[str, Any]] = []
    for logprobs, stop in CASES:
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(2):
            for way in WAYS:
                taken[way] += measure(options, way, logprobs, stop)
        for way, seconds in taken.items():
            whole, front_end = (statistics.median(part) for part in zip(*seconds, strict=True))
            case = {"way": way, "logprobs": logprobs, "stop": stop}
            rows.append({**case, "seconds": whole, "front_end": front_end, "each": seconds})
    stack = versions("vllm", "torch")
    if options.json:
        options.json.write_text(json.dumps({"card": card(), "versions": stack, "rows": rows}, indent=1))
    count = options.requests * options.tokens
    print(f"{card()}, {stack}: {options.requests} requests of {options.tokens} tokens, medians of {2 * options.rounds}")
    print(f"{'':<18}{'log-probs':>10}{'stop':>6}{'seconds':>9}{'us a token':>12}{'front end':>11}")
    for row in rows:
        print(
            f"{row['way']:<18}{'yes' if row['logprobs'] else 'no':>10}{'yes' if row['stop'] else 'no':>6}"
            f"{row['seconds']:>9.2f}"
            f"{row['seconds'] / count * 1e6:>12.1f}{row['front_end']:>9.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
