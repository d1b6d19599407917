"""``openrlhf config`` and the page of flags."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from config_cases import REQUIRED, parsed, write

from openrlhf.config import COMMANDS, docs, parse_cli
from openrlhf.config.explain import main

PPO = "train_ppo_ray"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_explain_shows_origins_and_arithmetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.yaml", "seed: 7\nrollout_batch_size: 8\n")
    flags = "--n_samples_per_prompt 4 --train_batch_size 32 --max_epochs 2 --num_episodes 3".split()
    flags += ["--micro_rollout_batch_size", "4"]
    status, out, err = run(capsys, "explain", PPO, "--config", path, *REQUIRED[PPO], *flags, "--num_rows", "40")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        f"seed 7 {path}:1",
        "train_batch_size 32 command line",
        "temperature 1",
        "critic_pretrain org/model automatic: as --pretrain",
        "samples of a rollout: 8 prompts x 4 responses = 32",
        "optimizer steps on a rollout: 32 / 32 samples x 2 epochs = 2",
        "micro-batches of a rank in an optimizer step: 32 / (4 x 8) = 1",
        "rollouts: 15",
        "total optimizer steps: 30, 1 of them warm-up",
        "GPUs (or ranks, on CPU): 25 in all; actor 8, ref 8, critic 8, engine 1",
    ):
        assert line in lines
    frozen = "--rollout_batch_size 8 --num_rows 40 --freezing_actor_steps 1".split()
    _, out, _ = run(capsys, "explain", PPO, *REQUIRED[PPO], *flags, *frozen)
    assert "total optimizer steps: 30, 1 of them" in out
    assert "optimizer steps of the actor: 26, 1 of them warm-up; it is frozen in the first 2 rollouts" in out


def test_explain_half_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", PPO, *REQUIRED[PPO], "--load_rollouts", ".", "--num_rows", "40")
    assert (
        "rollouts: those in ." in out and "total optimizer steps" not in out and "engine" not in out.split("GPUs (")[1]
    )
    flags = ["--rollout_only", "--dump_rollouts", "dump", "--num_rows", "2048"]
    _, out, _ = run(capsys, "explain", PPO, *REQUIRED[PPO], *flags)
    assert "rollouts: 2\n  nothing is trained\n  GPUs (or ranks, on CPU): 1 in all; engine 1" in out


def test_explain_counts_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "rows.jsonl", "{}\n" * 110)
    flags = [
        "--pretrain",
        "a/b",
        "--dataset",
        data,
        "--train_batch_size=16",
        "--micro_train_batch_size=2",
    ]
    status, out, _ = run(capsys, "explain", "train_dpo", *flags, "--max_epochs", "4")
    assert status == 0 and "rows: 110" in out and "total optimizer steps: 27" in out
    _, out, _ = run(capsys, "explain", "train_dpo", *REQUIRED["train_dpo"])
    assert "tell it with --num_rows" in out


def test_explain_shows_problems_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "explain", "train_sft", "--zero_stage", "9")
    assert status == 2 and "zero_stage" in out and "3 problems" in err and "What follows" not in out


def test_secrets_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = ["--use_wandb", "KEY123", "--prompt_data", "a/b"]
    flags = [*REQUIRED[PPO], *secrets, "--remote_rm_url", "http://me:PASSWORD@host/x"]
    for action in ("explain", "show"):
        status, out, err = run(capsys, action, PPO, *flags)
        assert status == 0
        assert "KEY123" not in out + err and "PASSWORD" not in out + err
    assert "http://me:***@host/x" in out


def test_show_can_be_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "now")  # part of a run's name, which is not shown
    for command, required in REQUIRED.items():
        status, out, _ = run(capsys, "show", command, *required)
        assert status == 0
        keys = list(yaml.safe_load(out))
        assert keys[0] == "command" and keys[1:] == sorted(keys[1:])
        path = write(tmp_path / "show.yaml", out)
        assert parse_cli(command, ["--config", path]) == parsed(command).config


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "a.yaml", "command: train_sft\nseed: 1\nds.zero_stage: 3\n")
    second = write(tmp_path / "b.yaml", "seed: 1\nmax_len: 4096\nuse_wandb: KEY\n")
    status, out, err = run(capsys, "diff", first, second)
    assert (status, err) == (1, "")
    assert out.splitlines() == ["max_len: 2048 -> 4096", "use_wandb: none -> ***", "zero_stage: 3 -> 2"]
    assert run(capsys, "diff", first, first) == (0, "", "")
    status, _, err = run(capsys, "diff", second, second)
    assert status == 2 and "name it last" in err
    assert run(capsys, "diff", second, second, "train_rm") == (0, "", "")
    status, _, err = run(capsys, "diff", first, write(tmp_path / "c.yaml", "sedd: 1\n"))
    assert status == 2 and "did you mean --seed" in err
    status, _, err = run(capsys, "diff", first, str(tmp_path / "missing.yaml"))
    assert status == 2 and "missing.yaml" in err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "what to do is missing"),
        (["explain"], "a command is needed"),
        (["explain", "train-pp"], "there is no command 'train-pp'; did you mean train_ppo_ray?"),
        (["show", "nothing"], "there is no command 'nothing'"),
        (["fly", "train_sft"], "'fly' is none of explain, show, diff"),
        (["diff", "a"], "two YAML files are needed"),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], argv: list[str], problem: str) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2 and out == "" and "usage: openrlhf config explain COMMAND" in err
    assert err.startswith(f"config: {problem}\n")


def test_help_of_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--help")[0] == 0


def test_bad_row_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", "train_sft", "--num_rows", "many"])
    assert end.value.code == 2 and "--num_rows" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]


def test_the_page_of_flags_is_fresh() -> None:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == docs.generate(), "run: python -m openrlhf.config.docs"


def test_the_page_is_written_by_the_module(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.config.docs", str(tmp_path / "flags.md")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "flags.md").read_text(encoding="utf-8") == docs.generate()


def test_changed_defaults_are_told() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(\w+)` \|", page.partition("## Defaults that differ")[2], re.MULTILINE))
    assert {"attn_implementation", "vllm_num_engines", "max_ckpt_mem"} <= told


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_help_are_valid(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "sft", "rm", "base", "adapter", "ckpt/checkpoints_sft"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("data.jsonl", "pairs.jsonl", "labelled.jsonl", "prompts.jsonl", "reward.py"):
        (tmp_path / file).touch()
    parse_cli(command, shlex.split(COMMANDS[command].example.replace("\\\n", " ")))


def _documented_commands() -> list[tuple[str, list[str]]]:
    """The ``openrlhf COMMAND ...`` lines of docs/configuration.md."""
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("openrlhf ")]
    return [(words[1], words[2:]) for words in lines]


def test_documented_commands_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").touch()
    (tmp_path / "run.yaml").write_text(_yaml_of_the_docs(), encoding="utf-8")
    (tmp_path / "other.yaml").write_text("command: train_ppo_ray\nseed: 1\n", encoding="utf-8")
    commands = _documented_commands()
    assert len(commands) >= 5
    for command, argv in commands:
        if command == "config":
            assert main(argv) in (0, 1), capsys.readouterr().err
        else:
            parse_cli(command, argv)


def _yaml_of_the_docs() -> str:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    return text.split("```yaml\n")[1].split("```")[0]
