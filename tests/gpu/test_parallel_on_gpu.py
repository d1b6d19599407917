"""Two GPUs that share sequences or layers train as one does, in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpus import COUNT
from rank_processes import run_ranks

from openrlhf.utils.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]

SCRIPT = Path(__file__).parent / "parallel_cases.py"
DEADLINE_S = 300


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parallel")
    make_tiny_model(folder / "model", "qwen3", hidden=256, layers=4, heads=4, kv_heads=2)
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        run_ranks(SCRIPT, ranks, folder, DEADLINE_S)
        found |= json.loads((folder / f"figures_{ranks}.json").read_text())
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["sequence", "tensor"])
def test_two_gpus_train_as_one(results: dict[str, Any], name: str, stage: int) -> None:
    one, two = results[f"alone {stage}"], results[f"{name} {stage}"]
    difference = np.abs(np.subtract(one["logprobs"], two["logprobs"]))
    assert difference.mean() < 0.02 and np.abs(one["logprobs"]).mean() > 1
    assert two["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert two["norms"] == pytest.approx(one["norms"], rel=2e-2)
    assert one["losses"][2] < one["losses"][0]
