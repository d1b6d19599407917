"""The console script."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

import pytest

from openrlhf.cli.main import main
from openrlhf.config import COMMANDS


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in shown
        assert COMMANDS[name].summary in shown


def test_no_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: openrlhf COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "meant"), [("train_sftt", "train_sft"), ("train-pp", "train_ppo_ray"), ("confg", "config")]
)
def test_a_wrong_name_gets_the_nearest(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize("name, advice", [("train_kd", "openrlhf train_sft"), ("train-ppo", "openrlhf train_ppo_ray")])
def test_a_former_command_says_what_to_use(name: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--pretrain", "m"]) == 2
    told = capsys.readouterr().err
    assert advice in told and "does not exist here" in told
    with pytest.raises(ImportError, match=advice):  # as python -m and torchrun do
        runpy.run_module(f"openrlhf.cli.{name.replace('-', '_')}", run_name="__main__")


def test_flags_reach_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train_sft", "--help"])
    assert stop.value.code == 0
    assert "usage: openrlhf train_sft" in capsys.readouterr().out


def test_config_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--help"]) == 0
    assert "config explain" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["hooks", "--help"], ["config", "explain", "--help"], ["config", "show", "-h"]])
def test_help_is_no_mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("usage: openrlhf ")


def test_a_reader_that_has_ended_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [
        sys.executable,
        "-m",
        "openrlhf.cli.main",
        "config",
        "show",
        "train_sft",
        "--pretrain",
        "m",
        "--dataset",
        "d",
    ]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_an_error() -> None:
    code = (
        "import sys, openrlhf.cli.main as m\n"
        "def run(words):\n    raise BrokenPipeError(32, 'of a worker')\n"
        "m.run = run\nsys.exit(m.main(['train_sft']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "of a worker" in done.stderr
