"""Metrics in files: a line for every call, the names that dashboards rely on, and no secrets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf.config import SFTConfig
from openrlhf.trainer.metrics_log import METRICS_FILE, MetricsError, MetricsLogger, public_config

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    logger = MetricsLogger(SFTConfig(), tmp_path)
    with pytest.raises(MetricsError, match=r"metrics.jsonl can't be written: .*No space left.*--run_dir"):
        logger.log("train", 1, {"gpt_loss": 1.0})
    logger.close()


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


class FakeRun:
    """Records what a W&B run is sent; fails when told to."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.metrics: list[str] = []
        self.fail = False
        self.finished = False

    def log(self, values: dict[str, Any]) -> None:
        if self.fail:
            raise OSError("connection lost")
        self.sent.append(values)

    def define_metric(self, name: str, **arguments: Any) -> None:
        self.metrics.append(name)

    def finish(self) -> None:
        self.finished = True


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
    assert {"train/*", "eval/*"} <= set(wandb.run.metrics) and wandb.run.finished


def test_broken_wandb_does_not_stop_training_nor_show_the_key(
    tmp_path: Path, wandb: SimpleNamespace, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(SFTConfig(use_wandb=KEY), tmp_path)
    wandb.run.fail = True
    logger.log("train", 1, {"gpt_loss": 1.0})
    logger.log("train", 2, {"gpt_loss": 1.0})
    logger.close()
    wandb.calls["broken"] = True
    MetricsLogger(SFTConfig(use_wandb=KEY), tmp_path, goes_on=True).close()
    assert len(lines(tmp_path)) == 2
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err + caplog.text


def test_public_config_leaves_secrets_out() -> None:
    shown = public_config(SFTConfig(use_wandb=KEY))
    assert "use_wandb" not in shown and shown["train_batch_size"] == 128
