"""The demo's parts: data, reward, curve. `make demo` is the test of the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import curve  # noqa: E402
import task  # noqa: E402


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_problems_are_in_no_training_file(tmp_path: Path) -> None:
    task.write_data(tmp_path, seed=1, sft_rows=3000, rl_rows=1500, held_out=200)
    held = {row["input"] for row in rows(tmp_path / "held_out.jsonl")}
    assert len(held) == 200
    for name, count in (("sft.jsonl", 3000), ("rl.jsonl", 1500)):
        seen = [row["input"] for row in rows(tmp_path / name)]
        assert len(seen) == count
        assert not held & set(seen)


def test_labels_are_sums_and_the_teacher_forgets_only_carries(tmp_path: Path) -> None:
    task.write_data(tmp_path, seed=2, sft_rows=4000, rl_rows=10, held_out=100)
    for row in rows(tmp_path / "rl.jsonl") + rows(tmp_path / "held_out.jsonl"):
        assert int(row["answer"]) == sum(map(int, row["input"].rstrip("=").split("+")))
    forgotten = with_carry = 0
    for row in rows(tmp_path / "sft.jsonl"):
        first, second = map(int, row["input"].rstrip("=").split("+"))
        wrong_by = first + second - int(row["output"])
        if first % 10 + second % 10 >= 10:
            with_carry += 1
            forgotten += wrong_by == 10
            assert wrong_by in (0, 10)
        else:
            assert wrong_by == 0
    # 2400 draws at 0.65: five standard deviations are 0.05
    assert forgotten / with_carry == pytest.approx(task.FORGETS, abs=0.05)


def test_data_depend_on_the_seed_only(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        task.write_data(tmp_path / name, seed, 50, 50, 20)
    read = {name: (tmp_path / name / "sft.jsonl").read_text() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


@pytest.mark.parametrize(
    ("response", "reward"), [("42<eos>", 1.0), ("42", 0.0), ("32<eos>", 0.0), ("042<eos>", 0.0), ("<eos>", 0.0)]
)
def test_the_reward_is_for_the_exact_number(response: str, reward: float) -> None:
    sys.path.insert(0, str(DEMO))
    namespace: dict[str, object] = {}
    exec((DEMO / "reward_func.py").read_text(), namespace)
    assert namespace["reward_func"](["27+15=" + response], ["27+15="], ["42"]) == {"rewards": [reward]}  # type: ignore[operator]


def test_the_curve_reads_what_a_run_writes(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step, "reward": step / 10} for step in range(1, 11)]
    lines.insert(4, {"kind": "eval", "step": 4, "reward": 9.0, "eval_sums_pass1": 0.5})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps, values = curve.read_metric(path, "reward")
    assert steps == list(range(1, 11))
    assert values == [step / 10 for step in range(1, 11)]
    assert curve.moving_mean([1.0, 2.0, 6.0], width=2) == [1.0, 1.5, 4.0]
    curve.save_png(steps, values, tmp_path / "curve.png", "reward")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert curve.read_metric(path, "eval_sums_pass1") == ([4], [0.5])
    with pytest.raises(ValueError, match="no values of 'nothing'; it has nothing like it"):
        curve.read_metric(path, "nothing")
    shown = subprocess.run(
        [sys.executable, str(DEMO / "curve.py"), str(path), str(tmp_path / "c.png"), "rewrd"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (shown.returncode, shown.stderr) == (1, f"error: {path} has no values of 'rewrd'; it has reward\n")


@pytest.mark.parametrize("script", ["demo/three_seeds.py", "demo/run.py", "scripts/make_small.py", "demo/curve.py"])
def test_a_call_for_help_makes_nothing(script: str, tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, str(DEMO.parent / script), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert Path(script).name in shown.stdout + shown.stderr and "Traceback" not in shown.stderr
    assert not list(tmp_path.iterdir())


def test_the_text_curve_rises_with_the_values() -> None:
    lines = curve.text_curve([0.0, 0.5, 1.0], height=2).splitlines()
    assert lines[0] == "  1.00 | ▁█"
    assert lines[1] == "  0.00 |▁██"
    assert curve.text_curve([0.5] * 3, height=2).splitlines()[1] == "  0.50 |▁▁▁"


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_the_whole_demo_in_a_short_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both stages and the report, with too few steps to learn much."""
    import run

    for name, value in (("SFT_ROWS", 320), ("RL_PROMPTS", 4), ("RL_STEPS", 2), ("HELD_OUT", 20)):
        monkeypatch.setattr(run, name, value)
    accuracies = run.run_demo(tmp_path / "demo", seed=0)
    run.report(tmp_path / "demo", accuracies, seconds=1.0)
    assert list(accuracies) == ["before SFT", "after SFT", "after RL"]
    assert all(0.0 <= value <= 1.0 for value in accuracies.values())
    shown = capsys.readouterr().out
    assert "held-out accuracy (greedy, 20 problems)" in shown
    assert "mean reward over 2 steps" in shown
    assert (tmp_path / "demo" / "reward_curve.png").stat().st_size > 1000
