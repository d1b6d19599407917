"""Steps with the optimizer away in between are the steps without: many sub-groups, as a model of billions has."""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_cases import options, packed, sequences  # noqa: E402

from openrlhf.models.loading import load_causal_lm  # noqa: E402
from openrlhf.models.logprobs import PolicyModel  # noqa: E402
from openrlhf.utils.tiny_model import make_tiny_model  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    shape: dict[str, Any] = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "tie": True}
    return make_tiny_model(tmp_path_factory.mktemp("sleep") / "model", "qwen3", **shape)


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_models_leave_the_gpu_and_come_back(folder: str, offload: bool) -> None:
    from openrlhf.workers.deepspeed_engine import TrainEngine
    from openrlhf.workers.distributed import init_distributed

    init_distributed(timeout_s=120)
    opts = options(zero_stage=2, param_dtype="bf16")
    model = load_causal_lm(folder, opts, trainable=False)
    batch = packed(sequences((64, 5, 129, 30)))
    size = sum(p.nbytes for p in model.parameters())
    engine = TrainEngine(PolicyModel(model), opts, None, param_offload=offload)
    with torch.no_grad():
        expected = engine(batch.to(engine.device)).logprobs.cpu()
        awake = torch.cuda.memory_allocated()
        for _ in range(2):
            engine.offload_states()
            assert awake - torch.cuda.memory_allocated() >= (0 if offload else size)
            engine.reload_states()
            assert torch.equal(engine(batch.to(engine.device)).logprobs.cpu(), expected)


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "muon": {},
    "lora": {"lora_rank": 4},
    "adam_offload": {"adam_offload": True},
    "4-bit": {"lora_rank": 4, "load_in_4bit": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sleep_between_steps_changes_nothing(
    folder: str, kind: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asleep a model holds hardly anything on the GPU, whatever of it is trained."""
    if kind == "4-bit":
        pytest.importorskip("bitsandbytes")
    from openrlhf.workers import deepspeed_engine
    from openrlhf.workers.deepspeed_engine import OptimizerSpec, TrainEngine
    from openrlhf.workers.distributed import init_distributed
    from openrlhf.workers.muon import MuonSpec

    init_distributed(timeout_s=120)
    original = deepspeed_engine.deepspeed_config

    def many_groups(*args: Any, **kwargs: Any) -> dict[str, Any]:
        config = original(*args, **kwargs)
        config["zero_optimization"]["sub_group_size"] = 100_000
        return config

    monkeypatch.setattr(deepspeed_engine, "deepspeed_config", many_groups)
    # stage 3 itself, which one rank would run as 2
    monkeypatch.setattr(deepspeed_engine, "effective_zero_stage", lambda stage, keep: stage)
    batch = packed(sequences((64, 5, 129, 30)))

    def logprobs(sleep: bool) -> list[torch.Tensor]:
        opts = options(zero_stage=stage, param_dtype="bf16", gradient_checkpointing=True, **KINDS[kind])
        muon = MuonSpec(lr=1e-6, dtype=torch.bfloat16) if kind == "muon" else None
        torch.manual_seed(0)
        gc.collect()
        before = torch.cuda.memory_allocated()
        engine = TrainEngine(PolicyModel(load_causal_lm(folder, opts)), opts, OptimizerSpec(1e-6, muon=muon))
        size = sum(math.prod(shape) * 2 for _, _, shape in engine.parameter_meta())
        seen = []
        for _ in range(3):
            for bucket in engine.gathered_parameters():
                bucket.clear()  # as a weight sync does
            if sleep:
                engine.offload_states()
                assert torch.cuda.memory_allocated() - before < size / 4
                engine.reload_states()
            engine.train()
            out = engine(batch.to(engine.device)).logprobs
            seen.append(out.detach().float().cpu())
            engine.backward(-out.sum() / 1000, last=True)
            engine.step()
            del out  # its graph holds 4-bit weights: bitsandbytes notes them beside what autograd saves
        return seen

    awake, slept = logprobs(False), logprobs(True)
    for one, other in zip(awake, slept, strict=True):
        assert torch.allclose(one, other, atol=2e-2)
    # A learning rate of 1e-6 moves hardly a bf16 weight; replaced weights would move log-probs by about 1.
    assert (slept[-1] - slept[0]).abs().max() < 0.2
