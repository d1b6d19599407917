"""A write that fails is no reason for a rank to stay away from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from openrlhf.config import PPOConfig, SFTConfig
from openrlhf.trainer import supervised
from openrlhf.trainer.supervised import run_command
from openrlhf.workers import checkpoint_writes, distributed
from openrlhf.workers.checkpoint_files import CheckpointError
from openrlhf.workers.checkpoint_writes import Writes, check_places, is_write_failure, write_problem
from openrlhf.workers.distributed import DistributedError, World, raise_together
from openrlhf.workers.model_worker import PolicyWorker


class Saver:
    """Stands for a DeepSpeed engine and its writer."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = self
        self.met = False

    def save(self, state_dict: Any, path: Path) -> None:
        path.write_text(state_dict)

    def makedirs(self, path: Path, exist_ok: bool) -> None:
        path.mkdir(exist_ok=exist_ok)

    def _copy_recovery_script(self, path: Path) -> None:
        raise AssertionError("after a failed write")

    def save_checkpoint(self, path: Path) -> None:
        self.checkpoint_engine.makedirs(path.parent.parent, exist_ok=True)
        self.checkpoint_engine.save(state_dict="x", path=path)
        self._copy_recovery_script(path)
        self.met = True


def writes_of(folder: Path) -> Writes:
    return Writes("writing checkpoint 1", folder / "new/global_step1")


def test_a_rank_that_can_not_write_goes_on_to_the_others_and_fails_there(tmp_path: Path) -> None:
    engine, writes = Saver(), writes_of(tmp_path)
    with writes.of_deepspeed(engine):
        engine.save_checkpoint(tmp_path / "missing" / "file")
    assert engine.met and set(vars(engine)) == {"checkpoint_engine", "met"}
    writes.run((tmp_path / "next").touch)
    assert not (tmp_path / "next").exists()
    message = "^writing checkpoint 1 failed: FileNotFoundError: .* GiB are free there"
    with pytest.raises(DistributedError, match=message) as caught:
        writes.raise_together()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_what_works_is_written_and_mistakes_come_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, writes = Saver(), writes_of(tmp_path)
    with writes.of_deepspeed(engine):
        engine.save_checkpoint(tmp_path / "file")
    assert engine.met and (tmp_path / "file").read_text() == "x"
    heard: list[str] = []

    def meet(problem: str, what: str) -> None:
        heard.append(f"{what}: {problem}")
        raise DistributedError(problem)

    monkeypatch.setattr(checkpoint_writes, "raise_together", meet)
    with pytest.raises(AssertionError, match="^after a failed write$"):
        writes.raise_together()
    assert heard == ["writing checkpoint 1: AssertionError: after a failed write"]
    with pytest.raises(RuntimeError, match="^Connection closed by peer$"), writes_of(tmp_path).of_deepspeed(engine):
        raise RuntimeError("Connection closed by peer")  # of one of DeepSpeed's collectives


def failing(write: Callable[[], None]) -> Exception:
    with pytest.raises(Exception) as caught:
        write()
    assert isinstance(caught.value, Exception)
    return caught.value


def test_which_errors_a_disk_has(tmp_path: Path) -> None:
    """With the texts of the installed torch and safetensors."""
    weights, missing, shared = {"w": torch.zeros(9999)}, tmp_path / "missing" / "file", torch.zeros(4)
    disk = [
        failing(lambda: torch.save(weights, "/dev/full")),
        failing(lambda: torch.save(weights, missing)),
        failing(lambda: torch.save(weights, tmp_path)),
        failing(lambda: save_file(weights, missing)),
        failing(lambda: missing.write_text("x")),
    ]
    assert [error for error in disk if not is_write_failure(error)] == []
    others = [
        failing(lambda: save_file({"a": shared, "b": shared}, tmp_path / "file")),
        failing(lambda: torch.save(lambda: None, tmp_path / "file")),
        torch.OutOfMemoryError("CUDA out of memory"),
        dist.DistBackendError("NCCL error in: inline_container.cc"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    ]
    assert [error for error in others if is_write_failure(error)] == []


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """torch only says that a position is not the expected one."""
    told = write_problem(RuntimeError("unexpected pos 307520 vs 307408"), tmp_path / "new/global_step1")
    assert told.startswith("RuntimeError: unexpected pos 307520 vs 307408; ")
    assert " GiB are free there" in told and "--ckpt_path, --save_path" in told


def test_a_disk_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the look at its room would take the place of the one to tell, and other ranks would wait."""

    def gone(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    for owner, name in ((checkpoint_writes.shutil, "disk_usage"), (Path, "exists")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, gone)
            told = write_problem(OSError(5, "Input/output error"), tmp_path / "new")
        assert told.startswith("OSError: [Errno 5] Input/output error; nor can the folder be looked at ([Errno 116] ")
        assert "--ckpt_path, --save_path" in told and "GiB" not in told


@pytest.mark.parametrize("own", ["", "no room"])
def test_the_first_rank_with_a_problem_is_told(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    def gather(told: list[str], problem: str) -> None:
        told[:] = ["", "disk full", own, ""]

    ranks = {"is_initialized": lambda: True, "get_world_size": lambda: 4, "all_gather_object": gather}
    monkeypatch.setattr(distributed, "dist", SimpleNamespace(**ranks))
    monkeypatch.setattr(distributed, "any_rank", lambda flag: True)
    with pytest.raises(DistributedError, match="^the test failed on rank 1: disk full$"):
        raise_together(own, "the test")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"save_path": "file"}, "--save_path .*file can't be written to"),
        ({"save_path": "file/new/model"}, "--save_path .*model can't be written to.*Not a directory"),
        ({"ckpt_path": "file/new", "save_steps": 5}, "--ckpt_path .*new can't be written to"),
        ({"ckpt_path": "file/new"}, ""),
        ({"save_path": "new/model", "ckpt_path": "there/ckpt", "save_steps": 5}, ""),
    ],
)
def test_a_place_that_can_not_be_written_to_is_told_before_training(
    flags: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "there").mkdir()
    paths = {key: str(tmp_path / flags.get(key, "there")) for key in ("save_path", "ckpt_path")}
    cfg = SFTConfig(**{**flags, **paths})
    with pytest.raises(CheckpointError, match=told) if told else nullcontext():
        check_places(cfg)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "there"], "nothing stays"


def test_every_command_looks_at_its_places_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file/model")
    with alone():
        assert run_command(SFTConfig(save_path=place), lambda *_: pytest.fail("it went on")) == 1
    assert f"error: --save_path {place} can't be written to" in capsys.readouterr().err
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.rank = 0
    with pytest.raises(CheckpointError, match="--save_path .*model can't be written to"):
        worker._build(PPOConfig(save_path=place), 1)


@contextmanager
def alone() -> Iterator[None]:
    """No process group: this process is all there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised, "init_distributed", lambda _: World(0, 1, 0))
        yield
