"""Metrics in files: a line for every call, the names that dashboards rely on, and no secrets."""

from __future__ import annotations

import errno
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from openrlhf.config import SFTConfig
from openrlhf.trainer import metrics_log
from openrlhf.trainer.metrics_log import METRICS_FILE, SAMPLES_SHOWN, MetricsError, MetricsLogger, public_config

KEY = "wandb-key-0123456789"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_file_has_every_step_and_survives_a_restart(tmp_path: Path) -> None:
    for steps in ((1, 2), (3,)):
        logger = MetricsLogger(SFTConfig(logging_steps=10), tmp_path / "run", goes_on=True)
        for step in steps:
            logger.log("train", step, {"gpt_loss": 0.5 * step, "lr": float("nan")})
        logger.close()
    got = lines(tmp_path / "run")
    assert [(line["kind"], line["step"], line["gpt_loss"], line["lr"]) for line in got] == [
        ("train", 1, 0.5, None),
        ("train", 2, 1.0, None),
        ("train", 3, 1.5, None),
    ]


def test_another_run_in_the_same_folder_has_a_file_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for loss in (1.0, 2.0, 3.0):
        logger = MetricsLogger(SFTConfig(), tmp_path)
        logger.log("train", 1, {"gpt_loss": loss})
        logger.close()
    files = [json.loads((tmp_path / name).read_text()) for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert [line["gpt_loss"] for line in (*files, *lines(tmp_path))] == [1.0, 2.0, 3.0]
    assert "which are now in metrics.2.jsonl" in caplog.text


class Disk:
    """Stands for an open file; the disk has room for so many more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_full_disk_costs_lines_which_are_counted_and_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = MetricsLogger(SFTConfig(), tmp_path)
    logger.log("train", 1, {"gpt_loss": 1.0})
    disk: Any = Disk(logger._lines._file, room=20)
    logger._lines._file = disk
    logger.log("train", 2, {"gpt_loss": 2.0})  # twenty bytes of it find room
    logger.log("train", 3, {"gpt_loss": 3.0})
    disk.room = 10**6
    logger.log("train", 4, {"gpt_loss": 4.0})
    logger.close()
    assert [(line["step"], line["gpt_loss"]) for line in lines(tmp_path)] == [(1, 1.0), (4, 4.0)]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and told[1].endswith("metrics.jsonl lacks 2 lines that could not be written")
    assert "No space left on device. The run goes on; lines will be missing" in told[0]


def test_a_file_that_can_not_even_be_looked_at_costs_lines_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = MetricsLogger(SFTConfig(), tmp_path)

    def refuse(file: int) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("openrlhf.trainer.metrics_log.os.fstat", refuse)
        logger.log("train", 1, {"gpt_loss": 1.0})
    logger.log("train", 2, {"gpt_loss": 2.0})
    logger.close()
    assert [line["step"] for line in lines(tmp_path)] == [2]
    assert "Stale file handle" in caplog.text and "lacks 1 lines" in caplog.text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_is_full_from_the_start_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    logger = MetricsLogger(SFTConfig(), tmp_path)
    for step in range(3):
        logger.log("train", step, {"gpt_loss": 1.0})
    logger.close()
    assert caplog.text.count("No space left") == 1 and "lacks 3 lines" in caplog.text


def test_folders_that_can_not_be_written_to_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MetricsError, match=r"file/run/metrics.jsonl can't be written: .*--run_dir chooses another"):
        MetricsLogger(SFTConfig(), tmp_path / "file" / "run")
    with pytest.raises(MetricsError, match=r"--use_tensorboard: .*file/r can't be written"):
        MetricsLogger(SFTConfig(use_tensorboard=str(tmp_path / "file"), wandb_run_name="r"), tmp_path)


def test_tensorboard_without_room_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger = MetricsLogger(SFTConfig(use_tensorboard=str(tmp_path / "tb")), tmp_path)
    board = logger._tensorboard._target

    def refuse(self: RecordWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", refuse)
    monkeypatch.setattr("threading.excepthook", lambda told: None)
    for step in range(20):
        logger.log("train", step, {"gpt_loss": 1.0})
        logger.log_text(step, "hello", 0.5)
        if logger._tensorboard._works:
            board.file_writer.event_writer._async_writer._worker.join(1.0)  # writes, and fails, in its thread
    logger.close()
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard does not take metrics any more ([Errno 28] No space left on device); the run goes on without it"
    ]
    assert len(lines(tmp_path)) == 20


@pytest.mark.parametrize("hangs", [False, True])
def test_what_fails_or_hangs_in_closing_is_told(
    tmp_path: Path,
    wandb: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hangs: bool,
) -> None:
    logger = MetricsLogger(SFTConfig(use_wandb=KEY, use_tensorboard=str(tmp_path / "tb")), tmp_path)
    over = threading.Event()

    def end() -> None:
        if hangs:
            over.wait(60)
        raise wandb.Error("the service process is busy")

    monkeypatch.setattr(metrics_log, "CLOSE_SECONDS", 0.1 if hangs else 60.0)
    monkeypatch.setattr(logger._tensorboard._target, "close", end)
    monkeypatch.setattr(wandb.run, "finish", end)
    logger.close()
    over.set()
    why = "did not end within 0.1 s" if hangs else "could not be closed (the service process is busy)"
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} {why}; its last metrics may be missing there" for name in ("TensorBoard", "W&B")
    ]


def test_extra_logs_replace_no_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = MetricsLogger(SFTConfig(), tmp_path)
    for step in (1, 2):
        logger.log("train", step, {"kl": 0.05}, {"kl": 30.0, "step": 9.0, "length": 4.0})
    logger.close()
    for step, line in enumerate(lines(tmp_path), 1):
        assert (line["kl"], line["extra/kl"], line["step"], line["extra/step"], line["length"]) == (
            0.05,
            30,
            step,
            9,
            4,
        )
        assert "extra/length" not in line
    assert [record.getMessage() for record in caplog.records] == [
        f"the extra log '{name}' has the name of a metric, and is logged as extra/{name}" for name in ("kl", "step")
    ]


def test_lines_are_there_before_the_logger_is_closed(tmp_path: Path) -> None:
    logger = MetricsLogger(SFTConfig(), tmp_path)
    logger.log("eval", 1, {"eval gpt_loss": 2.0})
    assert lines(tmp_path)[0]["eval gpt_loss"] == 2.0
    logger.close()


def test_tensorboard_gets_every_nth_step_under_the_known_names(tmp_path: Path) -> None:
    cfg = SFTConfig(logging_steps=2, use_tensorboard=str(tmp_path / "tb"), wandb_run_name="mine")
    logger = MetricsLogger(cfg, tmp_path / "run")
    for step in range(1, 5):
        logger.log("train", step, {"gpt_loss": float(step)})
    logger.log("eval", 3, {"eval gpt_loss": 7.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb" / "mine")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/gpt_loss")] == [(2, 2.0), (4, 4.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/eval gpt_loss")] == [(3, 7.0)]


@pytest.mark.parametrize(("every", "goes_on"), [(1, True), (2, True), (1, False)])
def test_tensorboard_shows_steps_after_a_checkpoint_once(tmp_path: Path, every: int, goes_on: bool) -> None:
    cfg = SFTConfig(logging_steps=every, use_tensorboard=str(tmp_path / "tb"), wandb_run_name="mine")
    for loss, first, last, continues in ((1.0, 1, 6, False), (2.0, 3, 5, goes_on)):  # the checkpoint is of step 2
        logger = MetricsLogger(cfg, tmp_path / "run", goes_on=continues)
        for step in range(first, last + 1):
            logger.log("train", step, {"gpt_loss": loss})
            logger.log("eval", step, {"eval gpt_loss": loss})
        logger.close()
    events = EventAccumulator(str(tmp_path / "tb" / "mine")).Reload()
    for name, steps in (("train/gpt_loss", every), ("eval/eval gpt_loss", 1)):
        old = [(step, 1.0) for step in range(1, 3 if goes_on else 7) if step % steps == 0]
        new = [(step, 2.0) for step in range(3, 6) if step % steps == 0]
        assert [(e.step, e.value) for e in events.Scalars(name)] == [*old, *new]


class FakeRun:
    """Records what a W&B run is sent; fails when told to."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.metrics: list[str] = []
        self.fail = False
        self.finished = threading.Event()

    def log(self, values: dict[str, Any]) -> None:
        if self.fail:
            raise OSError("connection lost")
        self.sent.append(values)

    def define_metric(self, name: str, **arguments: Any) -> None:
        self.metrics.append(name)

    def finish(self) -> None:
        self.finished.set()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    run = FakeRun()
    calls: dict[str, Any] = {}

    def init(**arguments: Any) -> FakeRun:
        if calls.get("broken"):
            raise OSError(f"bad key {KEY}")
        calls["init"] = arguments
        return run

    module = SimpleNamespace(
        Error=type("Error", (Exception,), {}),
        Settings=lambda **arguments: arguments,
        Table=lambda columns, data: (columns, data),
        api=SimpleNamespace(api_key=None),
        login=lambda key, timeout: calls.update(key=key),
        init=init,
        run=run,
        calls=calls,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_names_steps_and_a_config_without_the_key(tmp_path: Path, wandb: SimpleNamespace) -> None:
    logger = MetricsLogger(SFTConfig(use_wandb=KEY, wandb_project="p", wandb_run_name="r"), tmp_path)
    logger.log("train", 3, {"gpt_loss": 1.0})
    logger.log_text(3, "hello", 0.5)
    logger.close()
    assert wandb.calls["key"] == KEY
    assert wandb.calls["init"]["project"] == "p" and wandb.calls["init"]["name"] == "r"
    assert KEY not in repr(wandb.calls["init"]["config"])
    assert wandb.run.sent[0] == {"train/gpt_loss": 1.0, "train/global_step": 3}
    table = wandb.run.sent[1]["train/generated_samples"]
    assert table == (["global_step", "text", "reward"], [[3, "hello", 0.5]])
    assert {"train/*", "eval/*"} <= set(wandb.run.metrics) and wandb.run.finished.is_set()


def test_broken_wandb_does_not_stop_training_nor_show_the_key(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(SFTConfig(use_wandb=KEY), tmp_path)
    wandb.run.fail = True
    logger.log("train", 1, {"gpt_loss": 1.0})
    logger.log("train", 2, {"gpt_loss": 1.0})
    assert caplog.text.count("W&B does not take metrics any more") == 1
    logger.close()
    assert wandb.run.finished.wait(30), "or it holds up the end of the process"
    wandb.calls["broken"] = True
    MetricsLogger(SFTConfig(use_wandb=KEY), tmp_path, goes_on=True).close()
    assert len(lines(tmp_path)) == 2
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err + caplog.text


def test_public_config_leaves_secrets_out() -> None:
    shown = public_config(SFTConfig(use_wandb=KEY))
    assert "use_wandb" not in shown and shown["train_batch_size"] == 128


def test_wandb_gets_as_many_rows_in_late_steps_as_in_early_ones(tmp_path: Path, wandb: SimpleNamespace) -> None:
    logger = MetricsLogger(SFTConfig(use_wandb=KEY), tmp_path)
    for step in range(SAMPLES_SHOWN + 3):
        logger.log_text(step, "hello", 0.5)
    tables = [sent["train/generated_samples"][1] for sent in wandb.run.sent]
    assert [row[0] for row in tables[-1]] == list(range(3, SAMPLES_SHOWN + 3))
    assert [len(table) for table in tables[:3]] == [1, 2, 3]
