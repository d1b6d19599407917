"""Rollout dumps."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.dump import DumpError, RolloutDumpWriter, count_groups, dump_files, read_rollout_dump
from openrlhf.rollout.trajectory import Trajectory


def sample(index: int = 0, group: int = 2, **options: Any) -> Trajectory:
    return Trajectory(
        prompt_id=1,
        group_id=group,
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
    path = writer.write(12, [sample(0), sample(1)], [sample(2)])
    assert path.name == "rollout_step_00000012.jsonl"
    assert [p.name for p in writer.directory.iterdir()] == [path.name]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["sample_index"], r["baseline"]) for r in records] == [(0, False), (1, False), (2, True)]
    first = records[0]
    assert (first["step"], first["text"], first["label"]) == (12, "Q\nä<eos>", "gold")
    assert (first["token_ids"], first["action_mask"]) == ([4, 5, 6], [False, True, True])
    assert (first["reward"], first["score"], first["weight_version"]) == (0.1, 0.0, [-1, 0, 1])
    samples, baselines = read_rollout_dump(path)
    for before, after in zip([sample(0), sample(1), sample(2)], [*samples, *baselines], strict=True):
        assert before.to_dict() == after.to_dict()
        np.testing.assert_array_equal(before.logprobs, after.logprobs)


def test_metadata_of_any_kind_is_written(tmp_path: Path) -> None:
    odd = sample(label=np.int64(3), array=np.arange(2), names={"b", "a"}, path=Path("x"))
    facts = read_rollout_dump(RolloutDumpWriter(tmp_path).write(1, [odd]))[0][0].metadata
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
    with pytest.raises(DumpError, match="rollout_step_00000001.jsonl line 2 is not a rollout record"):
        read_rollout_dump(path)
    with pytest.raises(DumpError, match="line 2 is not a rollout record"):
        count_groups(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="missing.jsonl can't be read"):
        read_rollout_dump(tmp_path / "missing.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DumpError, match="binary.jsonl can't be read"):
        read_rollout_dump(tmp_path / "binary.jsonl")


def test_files_come_in_the_order_of_steps_by_kind(tmp_path: Path) -> None:
    writer = RolloutDumpWriter(tmp_path)
    for step in (10, 9):
        writer.write(step, [sample(0), sample(0, 3), sample(1)])
    writer.write(9, [sample()], kind="eval")
    (tmp_path / "other.jsonl").write_text("")
    assert [p.name[:-6] for p in dump_files(tmp_path)] == ["rollout_step_00000009", "rollout_step_00000010"]
    assert [p.name for p in dump_files(tmp_path, ("eval",))] == ["eval_step_00000009.jsonl"]
    one = dump_files(tmp_path)[0]
    assert dump_files(one) == [one] and count_groups(one) == 2


def test_steps_are_written_beside_the_caller_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, disk = RolloutDumpWriter(tmp_path), threading.Event()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (disk.wait(30), fsync(file)))
    writer.submit(1, [sample()])
    writer.submit(2, [sample()])
    assert dump_files(tmp_path) == []  # both submitted, none on the disk
    third = threading.Thread(target=writer.submit, args=(3, [sample()]))
    third.start()
    third.join(0.2)
    assert third.is_alive()  # no more than two wait in memory
    disk.set()
    third.join(30)
    writer.close()
    assert len(dump_files(tmp_path)) == 3


def test_an_error_of_the_disk_is_told_with_the_next_step(tmp_path: Path) -> None:
    writer = RolloutDumpWriter(tmp_path / "dump", complete=True)
    (tmp_path / "dump").rmdir()
    writer.submit(1, [sample()])
    with pytest.raises(DumpError, match="rollout_step_00000001.jsonl can't be written"):
        writer.close()


def test_training_goes_on_without_steps_that_the_disk_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RolloutDumpWriter(tmp_path / "dump")
    (tmp_path / "dump").rmdir()
    writer.submit(1, [sample()])
    writer.submit(2, [sample()])
    writer.submit(3, [sample()])
    writer._wait(0)
    (tmp_path / "dump").mkdir()
    writer.submit(4, [sample()])
    writer.close()
    assert [path.name for path in dump_files(tmp_path / "dump")] == ["rollout_step_00000004.jsonl"]
    told = [record.message for record in caplog.records]
    assert len(told) == 2 and "rollout_step_00000001.jsonl can't be written" in told[0]
    assert told[0].endswith("The run goes on; files will be missing")
    assert told[1] == f"{tmp_path / 'dump'} lacks 3 files that could not be written"


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    size = RolloutDumpWriter(tmp_path / "probe").write(1, [sample()]).stat().st_size
    writer = RolloutDumpWriter(tmp_path / "dump", max_bytes=2.5 * size)
    for step in (1, 2, 3, 4):
        writer.write(step, [sample()])
    assert [p.name[13:21] for p in dump_files(writer.directory)] == ["00000003", "00000004"]
    writer.write(4, [sample()])  # the same step again needs no room
    assert len(dump_files(writer.directory)) == 2
    writer.write(5, [sample()] * 4)  # over the limit alone: written all the same
    assert [p.name[13:21] for p in dump_files(writer.directory)] == ["00000005"]
    keeper = RolloutDumpWriter(writer.directory, max_bytes=5 * size, complete=True)
    keeper_files = dump_files(writer.directory)
    with pytest.raises(DumpError, match=r"over its limit of .* GiB \(--dump_max_gib\)"):
        keeper.write(6, [sample()] * 2)
    assert dump_files(writer.directory) == keeper_files and len(list(writer.directory.iterdir())) == 1
