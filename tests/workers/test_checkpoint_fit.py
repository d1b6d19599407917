"""Which checkpoints a run goes on from, and what it is told about the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from openrlhf.workers.checkpoint_files import CheckpointError
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
        else:
            with pytest.raises(CheckpointError, match=f"--zero_stage {stage} can't read it; take --zero_stage"):
                check_fit(tmp_path, tag, setup(stage), universal=True)
    with pytest.raises(CheckpointError, match="--zero_stage 0 with fp32 reads nothing in the universal format"):
        check_fit(tmp_path, tag, setup(0, "fp32"), universal=True)


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
