"""What a real engine must hold on any device: every token of every response is what the model says it is."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from large_logits import enlarge_logits
from transformers import AutoModelForCausalLM
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from openrlhf.engines.core_process import METHOD_VARIABLE, CoreStart
from openrlhf.engines.spec import engine_environment, model_arguments
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.rollout.protocol import GenerationResult, SamplingParams
from openrlhf.utils.tiny_model import make_tiny_model

PAUSES = 3
BLOCK = 32


@dataclass
class Served:
    """A prompt and its response."""

    prompt: list[int]
    sampling: SamplingParams
    result: GenerationResult


def requests(vocabulary: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths, half of them with the same beginning, and responses that end in every way."""
    draw = random.Random(0)
    beginning = [draw.randrange(3, vocabulary) for _ in range(90)]
    made = []
    for seed in range(count):
        length = draw.randrange(1, 90)
        prompt = beginning[:length] if seed % 2 else [draw.randrange(3, vocabulary) for _ in range(length)]
        stop_ids = (draw.randrange(3, vocabulary),) if seed % 5 == 0 else ()
        stop = (f"{draw.randrange(10)}",) if seed % 7 == 0 else ()
        limit = draw.choice([1, 2, 30, 60, 100])
        options: dict[str, Any] = {
            "stop_token_ids": stop_ids,
            "stop": stop,
            "ignore_eos": seed % 3 == 0,
            "min_tokens": 0,
        }
        made.append((prompt, SamplingParams(max_tokens=limit, seed=seed, logprobs=True, **options)))
    return made


def serve(
    monkeypatch: pytest.MonkeyPatch, folder: str, dtype: str, count: int, fp32_head: bool = False
) -> list[Served]:
    """Responses of an engine with fewer places than requests and a small cache, which is paused at times.

    In a pause what running requests have in the cache is dropped, as when weights change.
    """
    on_cpu = not torch.cuda.is_available()
    for name, value in engine_environment(on_cpu=on_cpu, full_determinism=False).items():
        monkeypatch.setenv(name, value)
    small = {"max_num_seqs": 16, "block_size": BLOCK, "num_gpu_blocks_override": 40, "max_model_len": 200}
    shown = {"logprobs_mode": "processed_logprobs", "gpu_memory_utilization": 0.2}
    arguments = model_arguments(folder, dtype, 200, on_cpu=on_cpu, fp32_head=fp32_head) | small | shown

    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    core = CoreStart()

    async def run() -> list[Served]:
        engine = VLLMEngine.__new__(VLLMEngine)
        with core.used():
            engine._llm = llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        engine.spec, engine._request_ids = type("Spec", (), {"index": 0})(), itertools.count()
        monkeypatch.setattr(llm.renderer, "render_cmpl", None)  # vLLM will not preprocess prompts here for long
        asked = requests(len(llm.tokenizer), count)
        done = 0

        async def ask(prompt: list[int], sampling: SamplingParams) -> Served:
            nonlocal done
            result = await engine.generate(prompt, sampling)
            done += 1
            return Served(prompt, sampling, result)

        async def pause() -> None:
            for number in range(1, PAUSES + 1):
                while done < count * number // (PAUSES + 1):
                    await asyncio.sleep(0.01)
                await llm.pause_generation(mode="keep", clear_cache=False)
                await llm.reset_prefix_cache(reset_running_requests=True)
                await llm.resume_generation()

        try:
            *served, _ = await asyncio.gather(*(ask(*each) for each in asked), pause())
        finally:
            llm.shutdown()
        return served

    try:
        return asyncio.run(run())
    finally:
        core.close()


def told_logprobs(served: list[Served]) -> torch.Tensor:
    """The engine's log-prob of every sampled token: float64[N]."""
    return torch.tensor([logprob for each in served for logprob in each.result.logprobs or ()], dtype=torch.float64)


def model_logprobs(model: Any, served: list[Served]) -> torch.Tensor:
    """The model's own log-prob of every sampled token: float64[N]."""
    logprobs = []
    for each in served:
        ids = torch.tensor([each.prompt + each.result.token_ids], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(each.prompt) - 1 : -1].double()
        logprobs.append(logits.log_softmax(-1).gather(1, ids[0, len(each.prompt) :, None])[:, 0])
    return torch.cat(logprobs).cpu()


def check_ends(served: list[Served], eos: int, decode: Any) -> None:
    """Each response ends where it must, and not before."""
    ends = {"length": 0, "stop": 0}
    for each in served:
        ids, sampling, told = each.result.token_ids, each.sampling, each.result
        assert told.logprobs is not None and len(told.logprobs) == len(ids) and told.weight_version == 0
        ends[told.finish_reason] += 1
        ending = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (eos,))}
        assert not ending.intersection(ids[:-1])
        assert not any(string in decode(ids[:-1]) for string in sampling.stop)
        stopped = ids[-1] in ending or any(string in decode(ids) for string in sampling.stop)
        assert stopped == (told.finish_reason == "stop")
        assert stopped or len(ids) == sampling.max_tokens
    assert min(ends.values()) > len(served) / 10


def check_fp32_head(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """What is the same in all logits of a token moves none of its probabilities, unless logits are rounded."""
    folder = make_tiny_model(path, "qwen3", hidden=256, heads=4, kv_heads=2)
    enlarge_logits(folder)
    served = serve(monkeypatch, folder, "bf16", 30, fp32_head=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.cuda() if torch.cuda.is_available() else model
    exact = model_logprobs(model, served)
    errors = (told_logprobs(served) - exact).abs()
    rounding = (model_logprobs(model.bfloat16(), served) - exact).abs()
    assert len(errors) > 500
    assert errors.mean() < 0.04 < 0.1 < rounding.mean(), (errors.mean(), rounding.mean())
