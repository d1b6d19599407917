"""What the training commands do before they load torch and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf import platform
from openrlhf.cli import common

COLUMNS = {
    "train_sft": ("input_key", "output_key"),
    "train_rm": ("prompt_key", "chosen_key", "rejected_key"),
    "train_dpo": ("prompt_key", "chosen_key", "rejected_key"),
    "train_kto": ("input_key", "output_key"),
}


class Loaded(Exception):
    """What comes next needs torch and DeepSpeed."""


@pytest.mark.parametrize("command", COLUMNS)
def test_a_column_that_a_small_file_lacks_is_told_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare() -> None:
        raise Loaded

    monkeypatch.setattr(platform, "prepare_process", prepare)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"a": "1", "b": "2", "c": "3", "label": 1}\n')
    words = ["--pretrain", str(tmp_path), "--dataset", str(data)]
    given = [word for flag, column in zip(COLUMNS[command], "abc", strict=False) for word in (f"--{flag}", column)]
    with pytest.raises(Loaded):
        common.train(command, "openrlhf.trainer.x", [*words, *given])
    assert common.train(command, "openrlhf.trainer.x", [*words, *given[:-1], "nope"]) == 1
    flag = COLUMNS[command][-1]
    assert f"has no column for --{flag} 'nope'; its columns are: a, b, c, label" in capsys.readouterr().err
