"""A write that fails is no reason for a rank to stay away from the others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.workers import distributed
from openrlhf.workers.checkpoint_writes import Writes
from openrlhf.workers.distributed import DistributedError, raise_together


class Saver:
    """Stands for a DeepSpeed engine and its writer."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = self
        self.met = False

    def save(self, state_dict: Any, path: Path) -> None:
        path.write_text(state_dict)

    def _copy_recovery_script(self, path: Path) -> None:
        raise AssertionError("after a failed write")

    def save_checkpoint(self, path: Path) -> None:
        self.checkpoint_engine.save(state_dict="x", path=path)
        self._copy_recovery_script(path)
        self.met = True


def test_a_rank_that_can_not_write_goes_on_to_the_others_and_fails_there(tmp_path: Path) -> None:
    engine, writes = Saver(), Writes(tmp_path / "global_step1")
    with writes.of_deepspeed(engine):
        engine.save_checkpoint(tmp_path / "missing" / "file")
    assert engine.met
    writes.run((tmp_path / "next").touch)
    assert not (tmp_path / "next").exists()
    message = r"^writing checkpoint \S+/global_step1 failed: FileNotFoundError: .* GiB are free there"
    with pytest.raises(DistributedError, match=message):
        writes.raise_together()


def test_what_works_is_written_and_mistakes_are_raised_at_once(tmp_path: Path) -> None:
    engine, writes = Saver(), Writes(tmp_path / "global_step1")
    with pytest.raises(AssertionError), writes.of_deepspeed(engine):
        engine.save_checkpoint(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x" and set(vars(engine)) == {"checkpoint_engine", "met"}
    writes.raise_together()


@pytest.mark.parametrize("own", ["", "no room"])
def test_the_first_rank_with_a_problem_is_told(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    def gather(told: list[str], problem: str) -> None:
        told[:] = ["", "disk full", own, ""]

    ranks = {"is_initialized": lambda: True, "get_world_size": lambda: 4, "all_gather_object": gather}
    monkeypatch.setattr(distributed, "dist", SimpleNamespace(**ranks))
    monkeypatch.setattr(distributed, "any_rank", lambda flag: True)
    with pytest.raises(DistributedError, match="^the test failed on rank 1: disk full$"):
        raise_together(own, "the test")
