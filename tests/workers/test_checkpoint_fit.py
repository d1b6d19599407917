"""Which checkpoints a run goes on from, and what it is told about the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.workers.checkpoint_files import META, CheckpointError
from openrlhf.workers.checkpoint_fit import Setup, check_fit

TRAINED = {"model.a": (2, 3), "model.b": (4,)}
PLAIN, LAYERS = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"


def setup(stage: int = 2, dtype: str = "bf16", ranks: int = 1, **changes: Any) -> Setup:
    return Setup(ranks, stage, stage, dtype, TRAINED | changes)


def universal(root: Path, file: str, **state: Any) -> str:
    (root / "step_uni").mkdir()
    shapes = [{"model.a": torch.Size([2, 3])}, {"model.b": torch.Size([4])}]
    torch.save({"param_shapes": shapes, "module": {}, **state}, root / "step_uni" / file)
    return "step_uni"


@pytest.mark.parametrize(("file", "stages"), [(PLAIN, (0, 1, 2)), (LAYERS, (3,))])
def test_the_universal_format_of_zero3_is_another(tmp_path: Path, file: str, stages: tuple[int, ...]) -> None:
    tag = universal(tmp_path, file)
    for stage in range(4):
        if stage in stages:
            check_fit(tmp_path, tag, setup(stage, ranks=5), universal=True)
            if stage:
                check_fit(tmp_path, tag, setup(stage, "fp32"), universal=True)
        else:
            with pytest.raises(CheckpointError, match=f"--zero_stage {stage} can't read it; take --zero_stage"):
                check_fit(tmp_path, tag, setup(stage), universal=True)
    with pytest.raises(CheckpointError, match="--zero_stage 0 with fp32 reads nothing in the universal format"):
        check_fit(tmp_path, tag, setup(0, "fp32"), universal=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"param_dtype": "fp32"}, ["--param_dtype was fp32, is bf16"]),
        ({"world_size": 4, "zero_stage": 3}, ["it was written by 4 ranks and this run has 2", "convert universal"]),
        ({"zero_stage": 3}, ["--zero_stage was 3, is 2"]),
        ({"tensor_parallel_size": 2}, ["--ds_tensor_parallel_size was 2"]),
        ({"param_dtype": "fp32", "tensor_parallel_size": 2}, ["--param_dtype was fp32", "_parallel_size was 2"]),
    ],
)
def test_partitions_of_another_layout_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    tag = universal(tmp_path, LAYERS)
    meta = {"param_dtype": "bf16", "world_size": 2, "zero_stage": 2, **changes}
    (tmp_path / tag / META).write_text(json.dumps(meta))
    run = setup(ranks=2)
    if not words:
        return check_fit(tmp_path, tag, run, universal=False)
    with pytest.raises(CheckpointError) as caught:
        check_fit(tmp_path, tag, run, universal=False)
    assert all(part in str(caught.value) for part in words)
    assert str(caught.value).count(";") == len(changes) - 1 - ("world_size" in changes)


def test_one_rank_that_runs_without_partitions_reads_none(tmp_path: Path) -> None:
    tag = universal(tmp_path, LAYERS)
    (tmp_path / tag / META).write_text(json.dumps({"param_dtype": "bf16", "world_size": 1, "zero_stage": 2}))
    with pytest.raises(CheckpointError, match="it has the partitions of several ranks' ZeRO-2 .run `openrlhf convert"):
        check_fit(tmp_path, tag, Setup(1, 0, 2, "bf16", TRAINED), universal=False)


def test_other_weights_are_named(tmp_path: Path) -> None:
    tag = universal(tmp_path, PLAIN)

    def refusal(run: Setup) -> str:
        with pytest.raises(CheckpointError) as caught:
            check_fit(tmp_path, tag, run, universal=True)
        return str(caught.value)

    assert "lacks 1 of the 3 weights that this run trains (model.c)" in refusal(setup(**{"model.c": (1,)}))
    assert "another shape (model.b: [4], here [5]). Resume with the model, --lora_rank" in refusal(
        setup(**{"model.b": (5,)})
    )
    adapters = refusal(Setup(1, 2, 2, "bf16", {"model.lora_A": (1, 3)}))
    assert "lacks 1 of the 1 " in adapters and "2 weights that this run doesn't train (model.a)" in adapters


def test_without_zero_the_weights_themselves_are_looked_at(tmp_path: Path) -> None:
    module = {"model.a": torch.zeros(2, 3), "model.b": torch.zeros(4), "model.frozen": torch.zeros(1)}
    tag = universal(tmp_path, PLAIN, param_shapes=None, module=module)
    check_fit(tmp_path, tag, setup(), universal=True)
    with pytest.raises(CheckpointError, match=r"model.b: \[4\], here \[5\]"):
        check_fit(tmp_path, tag, setup(**{"model.b": (5,)}), universal=True)


def test_damaged_and_incomplete_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint, or not complete"):
        check_fit(tmp_path, "none", setup(), universal=True)
    tag = universal(tmp_path, PLAIN)
    path = tmp_path / tag / PLAIN
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is damaged"):
        check_fit(tmp_path, tag, setup(), universal=True)
