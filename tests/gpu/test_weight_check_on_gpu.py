"""``--check_weight_sync`` in vLLM itself: equal weights have no difference, a single planted element is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import COUNT

from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PLANTED = "model.layers.1.mlp.down_proj.weight"


def plant(worker: Any) -> float:
    """Change one element of a worker's weights, by what is returned."""
    weight = dict(worker.model_runner.model.named_parameters())[PLANTED].data.view(-1)
    before = float(weight[7])
    weight[7] += 0.5
    return abs(float(weight[7]) - before)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_a_planted_element_is_found(
    tmp_path: Path, tie: bool, tensor_parallel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if COUNT < tensor_parallel:
        pytest.skip(f"needs {tensor_parallel} GPUs")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function is sent to the workers,
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # which can't be forks: this process has used the GPU
    from vllm import LLM

    shape: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "tie": tie}
    folder = make_tiny_model(tmp_path / "model", "qwen3", **shape)
    llm = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="mp" if tensor_parallel > 1 else "uni",
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 28,
        worker_extension_cls="openrlhf.engines.weight_sync.plugin.WorkerExtension",
    )
    try:
        for found in llm.collective_rpc("compare_weights", args=(folder,)):
            assert found.differences == [] and found.tensors > 10
        changes = llm.collective_rpc(plant)
        for change, found in zip(changes, llm.collective_rpc("compare_weights", args=(folder,)), strict=True):
            (difference,) = found.differences
            assert (difference.name, difference.differing) == (PLANTED, 1)
            assert difference.largest == pytest.approx(change)
        # A comparison leaves what the files say.
        assert all(found.differences == [] for found in llm.collective_rpc("compare_weights", args=(folder,)))
    finally:
        llm.llm_engine.engine_core.shutdown()
