"""Rollout dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.dump import RolloutDumpWriter, read_rollout_dump
from openrlhf.rollout.trajectory import Trajectory


def sample(index: int = 0, **options: Any) -> Trajectory:
    return Trajectory(
        prompt_id=1,
        group_id=2,
        sample_index=index,
        token_ids=np.array([4, 5, 6]),
        action_mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.1, -1 / 3], dtype=np.float32),
        weight_version=np.array([-1, 0, 1]),
        reward=0.1,
        score=0.0,
        metadata={"prompt": "Q\n", "response": "ä<eos>", "label": "gold", **options},
    )


def test_a_step_is_written_and_read_back_exactly(tmp_path: Path) -> None:
    writer = RolloutDumpWriter(tmp_path / "new" / "folder")
    path = writer.write(12, [sample(0), sample(1)])
    assert path.name == "rollout_step_00000012.jsonl"
    assert [p.name for p in writer.directory.iterdir()] == [path.name]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["sample_index"] for r in records] == [0, 1]
    first = records[0]
    assert (first["step"], first["text"], first["label"]) == (12, "Q\nä<eos>", "gold")
    assert (first["token_ids"], first["action_mask"]) == ([4, 5, 6], [False, True, True])
    assert (first["reward"], first["score"], first["weight_version"]) == (0.1, 0.0, [-1, 0, 1])
    for before, after in zip([sample(0), sample(1)], read_rollout_dump(path), strict=True):
        assert before.to_dict() == after.to_dict()
        np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_metadata_of_any_kind_is_written(tmp_path: Path) -> None:
    odd = sample(label=np.int64(3), array=np.arange(2), names={"b", "a"}, path=Path("x"))
    facts = read_rollout_dump(RolloutDumpWriter(tmp_path).write(1, [odd]))[0].metadata
    assert (facts["label"], facts["array"], facts["names"], facts["path"]) == (3, [0, 1], ["a", "b"], "x")


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    writer = RolloutDumpWriter(tmp_path)
    path = writer.write(1, [sample()])
    before = path.read_bytes()
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Circular"):
        writer.write(1, [sample(0), sample(1, label=loop)])
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": 1, "text": "", "label": "", "x": 2}'])
def test_damaged_lines_are_named(tmp_path: Path, line: str) -> None:
    path = RolloutDumpWriter(tmp_path).write(1, [sample()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="rollout_step_00000001.jsonl line 2 is not a rollout record"):
        read_rollout_dump(path)
