"""Images of requests that run, come and wait while weights change."""

from __future__ import annotations

import asyncio
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vision_cases import make_tiny_vision_model
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from openrlhf.engines import vllm_engine
from openrlhf.engines.images import IMAGES_VARIABLE, process_images_without_torchvision
from openrlhf.engines.spec import EngineSpec, engine_environment, model_arguments
from openrlhf.engines.vllm_engine import VLLMEngine
from openrlhf.rollout.protocol import GenerationResult, PlacedImage, SamplingParams


def test_an_image_that_comes_while_an_engine_pauses_is_still_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine_environment(on_cpu=True, full_determinism=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(IMAGES_VARIABLE, "1")
    process_images_without_torchvision()  # vLLM's plugins may have been loaded before
    monkeypatch.setattr(vllm_engine, "IMAGE_TRIES", 1)  # none shall be missing in the first place
    arguments = model_arguments(make_tiny_vision_model(tmp_path / "model"), "fp32", 128, on_cpu=True)
    arguments |= {"limit_mm_per_prompt": {"image": 1, "video": 0}, "enable_sleep_mode": False}
    file = io.BytesIO()
    Image.new("RGB", (56, 56), (200, 10, 10)).save(file, "PNG")

    async def run() -> None:
        engine = VLLMEngine.__new__(VLLMEngine)
        engine.spec = EngineSpec(0, arguments, "gloo", "", {})
        engine._request_ids = itertools.count()
        engine._llm = llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        pause, call = llm.engine_core.pause_scheduler_async, llm.collective_rpc
        place = llm.model_config.hf_config.image_token_id

        async def ask(tokens: int) -> GenerationResult:
            ids = [5, place - 1, *[place] * 4, place + 1, 6]
            sampling = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True, logprobs=True)
            return await engine.generate(ids, sampling, [PlacedImage(2, 4, file.getvalue())])

        async def late(*args: Any, **options: Any) -> None:
            assert (await ask(1)).finish_reason == "length"  # between the front end's part of a pause and the core's
            await pause(*args, **options)

        async def without_weights(method: Any, *args: Any, **options: Any) -> Any:
            return None if str(method).endswith("_weight_update") else await call(method, *args, **options)

        monkeypatch.setattr(llm.engine_core, "pause_scheduler_async", late)
        monkeypatch.setattr(llm, "collective_rpc", without_weights)
        try:
            running = asyncio.ensure_future(ask(100))
            await asyncio.sleep(0)
            await engine.start_weight_update()
            waiting = asyncio.ensure_future(ask(2))
            await engine.finish_weight_update(1)
            answers = [await running, await waiting, await ask(3)]
        finally:
            llm.shutdown()
        assert [len(answer.token_ids) for answer in answers] == [100, 2, 3]
        versions = answers[0].weight_version
        assert isinstance(versions, list) and versions == sorted(versions) and {*versions} == {0, 1}
        assert [answer.weight_version for answer in answers[1:]] == [1, 1]

    asyncio.run(run())
