"""What a supervised run does with an earlier one's checkpoints and metrics, with a reference model's memory, and with
its own model at the end."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from openrlhf.algorithms.metrics import MetricSum
from openrlhf.config import SFTConfig
from openrlhf.datasets.order import ResumableOrder
from openrlhf.trainer import checkpoint, metrics_log, reference
from openrlhf.trainer.supervised import SupervisedTrainer
from openrlhf.workers.checkpoint_files import finish_checkpoint, writing_tag
from openrlhf.workers.distributed import World

ROWS = 8


class Engine:
    """Stands for the trained model: restores three steps."""

    step_count = 0

    def load_checkpoint(self, root: Path, tag: str) -> dict[str, Any]:
        self.step_count = 3
        return {"order": ResumableOrder(ROWS, 42).state_dict()}

    def train(self) -> None:
        pass

    def save_hf(self, path: str, *_: Any) -> None:
        Path(path).mkdir(exist_ok=True)


class Trainer(SupervisedTrainer):
    """Has no step to do."""

    headline = ()
    running_means: dict[str, str] = {}

    def accumulate(self, rows: list[int]) -> MetricSum:
        raise AssertionError("no step is left")

    def evaluate(self) -> dict[str, float]:
        return {}


def trainer(folder: Path, steps: int = 0, **flags: Any) -> Trainer:
    """A run over eight rows."""
    cfg = SFTConfig(ckpt_path=str(folder), run_dir=str(folder / "run"), save_path=str(folder / "model"), seed=42)
    parts: Any = (dataclasses.replace(cfg, **flags), World(0, 1, 0), Engine(), None)
    return Trainer(*parts, data=range(ROWS), eval_data=None, steps=steps)


def start(folder: Path, load_checkpoint: bool) -> list[str]:
    """Names of the metrics files after a run in a folder that has those of an earlier one."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("{}\n")
    trainer(folder, load_checkpoint=load_checkpoint).fit()
    return sorted(file.name for file in run.glob("*.jsonl"))


def write_checkpoint(folder: Path) -> None:
    (folder / writing_tag("global_step3")).mkdir()
    finish_checkpoint(folder, "global_step3", {"step": 3})


def test_checkpoints_of_an_earlier_run_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, load_checkpoint=False)
    assert "has checkpoints" not in caplog.text
    write_checkpoint(tmp_path)
    start(tmp_path, load_checkpoint=True)
    assert "has checkpoints" not in caplog.text
    start(tmp_path, load_checkpoint=False)
    assert "has checkpoints of an earlier run, the newest is global_step3" in caplog.text


def test_only_the_first_rank_tells(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.dist, "is_initialized", lambda: True)
    for rank in (0, 1):
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
        checkpoint._tell("100% once")
    assert caplog.text.count("100% once") == 1


def test_metrics_are_continued_only_with_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert start(tmp_path, load_checkpoint=True) == ["metrics.1.jsonl", "metrics.jsonl"]
    assert "there is no checkpoint" in caplog.text
    write_checkpoint(tmp_path)
    assert start(tmp_path, load_checkpoint=True) == ["metrics.1.jsonl", "metrics.jsonl"], "continued"
    assert start(tmp_path, load_checkpoint=False) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_the_model_is_saved_before_a_logger_can_fail_or_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[bool] = []

    class Run:
        """Stands for a W&B run whose upload fails."""

        def define_metric(self, name: str, **axis: object) -> None: ...

        def finish(self) -> None:
            saved.append((tmp_path / "model").exists())
            raise ConnectionResetError("the service is gone")

    monkeypatch.setattr(metrics_log, "_open_wandb", lambda *_: Run())
    trainer(tmp_path).fit()
    assert saved == [True]
    with pytest.raises(AssertionError, match="no step is left"):  # and not what the logger has to say
        trainer(tmp_path, steps=1).fit()
    assert len(saved) == 2


def test_a_reference_model_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-3 with --zpg a parameter has two parts beside its own data, else one or none."""
    module = nn.ParameterList([torch.ones(4) for _ in range(3)])
    held = list(module)
    for number, parameter in enumerate(module):
        if number:
            parameter.ds_id, parameter.ds_tensor, parameter.ds_secondary_tensor = number, torch.ones(2), None
            held.append(parameter.ds_tensor)
    module[2].ds_secondary_tensor = torch.ones(3)
    held.append(module[2].ds_secondary_tensor)
    reference._free(module)
    assert [part.numel() for part in held] == [0] * 6
