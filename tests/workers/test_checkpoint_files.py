"""Checkpoint folders: what a killed process leaves behind, what is kept, and random states."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf.workers import checkpoint_files as files


def write(root: Path, tag: str, size: int = 10, lineage: str | None = None) -> None:
    scratch = root / files.writing_tag(tag)
    scratch.mkdir(parents=True)
    (scratch / "shard").write_bytes(b"x" * size)
    files.finish_checkpoint(root, tag, {"step": int(tag[-1]), files.LINEAGE: lineage})
    # file systems with coarse clocks would make the order ambiguous
    stamp = 1_000_000_000 * int(tag[-1])
    os.utime(root / tag / files.META, ns=(stamp, stamp))


def test_unfinished_checkpoint_is_invisible(tmp_path: Path) -> None:
    write(tmp_path, "global_step1")
    half = tmp_path / files.writing_tag("global_step2")
    half.mkdir()
    (half / "shard").write_bytes(b"x")
    assert files.latest_tag(tmp_path) == "global_step1"
    assert files.checkpoint_tags(tmp_path) == ["global_step1"]
    files.rotate_checkpoints(tmp_path, 3, float("inf"))
    assert not half.exists(), "what a killed run left is cleared at the next save"


def test_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, "global_step1", size=1)
    write(tmp_path, "global_step1", size=2)
    assert (tmp_path / "global_step1" / "shard").stat().st_size == 2
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_rotation_by_number(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, f"global_step{step}")
        (tmp_path / f"global_step{step}_hf").mkdir()
    assert files.rotate_checkpoints(tmp_path, 2, float("inf")) == ["global_step1"]
    assert not (tmp_path / "global_step1_hf").exists() and (tmp_path / "global_step2_hf").exists()


def test_rotation_by_size_keeps_at_least_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, f"global_step{step}", size=1 << 20)
    (tmp_path / "global_step3_hf").mkdir()
    assert files.rotate_checkpoints(tmp_path, 10, 3.5 / 1024) == []
    (tmp_path / "global_step3_hf" / "model.safetensors").write_bytes(b"x" * (1 << 20))
    assert files.rotate_checkpoints(tmp_path, 10, 3.5 / 1024) == ["global_step1"]
    assert files.rotate_checkpoints(tmp_path, 10, 0.0) == ["global_step2"]
    assert files.checkpoint_tags(tmp_path) == ["global_step3"]


def test_best_checkpoints_are_apart_and_replace_each_other(tmp_path: Path) -> None:
    write(tmp_path, "best_global_step1")
    for step in (2, 3, 4):
        write(tmp_path, f"global_step{step}")
    assert files.rotate_checkpoints(tmp_path, 2, float("inf")) == ["global_step2"]
    write(tmp_path, "best_global_step5")
    assert files.checkpoint_tags(tmp_path) == ["global_step3", "global_step4", "best_global_step5"]


def test_checkpoints_of_an_earlier_run_are_kept_and_told(tmp_path: Path) -> None:
    """Also a damaged one, and those of a release without the entry; a run that goes on from them counts them."""
    assert files.earlier_run(tmp_path) is None
    for tag in ("best_global_step3", "global_step4", "global_step5"):
        write(tmp_path, tag, lineage="first")
    (tmp_path / "global_step4" / files.META).write_text("{")
    os.utime(tmp_path / "global_step4" / files.META, (4, 4))
    told = files.earlier_run(tmp_path)
    assert told is not None and "the newest is global_step5" in told and "--load_checkpoint" in told
    for step in (1, 2, 3):
        write(tmp_path, f"global_step{step}", lineage="second")
        files.rotate_checkpoints(tmp_path, 2, float("inf"))
    write(tmp_path, "best_global_step2", lineage="second")
    kept = ["best_global_step2", "global_step2", "best_global_step3", "global_step3", "global_step4", "global_step5"]
    assert files.checkpoint_tags(tmp_path) == kept
    write(tmp_path, "global_step6", lineage="first")
    assert files.rotate_checkpoints(tmp_path, 1, float("inf")) == ["global_step5"]


def test_metric_of_a_best_checkpoint_is_recorded(tmp_path: Path) -> None:
    (tmp_path / files.writing_tag("best_global_step1")).mkdir()
    files.finish_checkpoint(tmp_path, "best_global_step1", {}, ("eval_default_pass1", 0.5))
    recorded = json.loads((tmp_path / "best_global_step1" / "metric.json").read_text())
    assert recorded == {"metric_key": "eval_default_pass1", "metric_value": 0.5}
    write(tmp_path, "global_step2")
    assert json.loads((tmp_path / "global_step2" / "metric.json").read_text())["metric_key"] is None


def test_missing_and_damaged_checkpoints_are_explained(tmp_path: Path) -> None:
    write(tmp_path, "global_step1")
    with pytest.raises(files.CheckpointError, match="no checkpoint 'global_step9'.*global_step1"):
        files.read_meta(tmp_path, "global_step9")
    (tmp_path / "global_step1" / files.META).write_text("{")
    with pytest.raises(files.CheckpointError, match="not complete"):
        files.read_meta(tmp_path, "global_step1")
    assert files.latest_tag(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("root", [".", "_actor"])
@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_a_checkpoint_of_another_program_has_ways_on(tmp_path: Path, root: str, name: str) -> None:
    folder = tmp_path / root / "global_step10"
    folder.mkdir(parents=True)
    (folder / name).touch()
    (folder.parent / files.LATEST).write_text("global_step10")
    assert files.resume_tag(folder.parent, universal=False) == "global_step10"
    with pytest.raises(files.CheckpointError, match="written by another program") as caught:
        files.read_meta(folder.parent, "global_step10")
    told = str(caught.value)
    assert "(the --save_path of that run) to --pretrain" in told
    for way in ("`openrlhf convert hf2resume`", "another --ckpt_path", "zero_to_fp32.py"):
        assert way in told
    (tmp_path / "global_step10_hf").mkdir()
    with pytest.raises(files.CheckpointError, match=rf"\({re.escape(str(tmp_path))}/global_step10_hf\) to --pretrain"):
        files.read_meta(folder.parent, "global_step10")


def test_a_start_from_the_beginning_is_never_silent(tmp_path: Path) -> None:
    assert files.resume_tag(tmp_path, universal=False) is None
    assert files.nothing_to_resume(tmp_path).endswith("starting from the beginning")
    (tmp_path / "global_step3_hf").mkdir()
    (tmp_path / "global_step3_hf/config.json").write_text("{}")
    assert "global_step3_hf have weights only: give one to --pretrain" in files.nothing_to_resume(tmp_path)
    write(tmp_path, "global_step1")
    (tmp_path / files.LATEST).unlink()
    with pytest.raises(files.CheckpointError, match="no file `latest`.*into it: global_step1"):
        files.resume_tag(tmp_path, universal=False)


def test_random_states_come_back() -> None:
    state = files.rng_state()
    first = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    files.set_rng_state(state)
    assert first == (random.random(), float(np.random.rand()), float(torch.rand(1)))
