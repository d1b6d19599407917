"""`openrlhf reward test`: what it says about rewards that are good, wrong, slow or constant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from openrlhf.cli import reward
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.tiny_model import character_tokenizer

RIGHT = """
def reward_func(queries, prompts, labels, metadata=None):
    right = [float(q[len(p):] == label) for q, p, label in zip(queries, prompts, labels)]
    return {"rewards": right, "scores": [2 * r for r in right], "extra_logs": {"level": [m["level"] for m in metadata]}}
"""
BROKEN = """
def reward_func(queries, prompts, labels):
    if any("7" in p for p in prompts):
        raise ValueError("seven is not allowed")
    return [1.0] * len(queries)
"""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}+1=", "answer": str(n + 1), "said": str(n + n % 2), "level": n} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("right.py").write_text(RIGHT)
    Path("broken.py").write_text(BROKEN)


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = reward.main(words.split())
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_rows_of_data(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "test --remote_rm_url right.py --dataset rows.jsonl --input_key question --output_key said --label_key answer"
    )
    code, text = run(f"{flags} --max_samples 20 --worst_rows 2", capsys)
    assert code == 0, text
    assert "right.py on 20 samples of rows.jsonl" in text
    # "said" is n + 1 for odd n and n for even n: half of them are right.
    assert "rewards   mean 0.5, std 0.5, min 0, quartiles 0 0.5 1, max 1, 2 different values" in text
    assert len(re.findall(r"^ .*#{40} 10$", text, re.MULTILINE)) == 2
    assert "scores    mean 1, " in text and "level     mean 9.5, " in text
    assert "of 2 calls" in text and "failures  0 of 20" in text
    assert re.findall(r"^  0  (row \d+), label (.*)$", text, re.MULTILINE) == [("row 0", "'1'"), ("row 2", "'3'")]
    assert "prompt ...'0+1='" in text and "response '0'" in text


def test_labels_stand_for_responses_and_templates_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(
        "test --remote_rm_url right.py --dataset rows.jsonl --input_key question --label_key answer "
        "--input_template Q:{} --worst_rows 1",
        capsys,
    )
    assert code == 0 and "on 40 samples" in text and "all rewards are equal" in text
    assert "prompt ...'Q:0+1='" in text


def test_responses_end_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "examples/demo/reward_func.py"  # the label, then the end token
    flags = f"test --remote_rm_url {demo} --dataset rows.jsonl --input_key question --label_key answer"
    code, text = run(flags, capsys)
    assert code == 0 and "rewards   mean 0," in text and "--pretrain MODEL adds its" in text
    character_tokenizer().save_pretrained("model")
    code, text = run(f"{flags} --pretrain model", capsys)
    assert code == 0 and "rewards   mean 1," in text and "end token" not in text


def test_several_rewards_are_summed_with_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(
        "test --remote_rm_url right=right.py,same=builtin:exact_match --reward_weights right=0.5,same=0.25 "
        "--dataset rows.jsonl --input_key question --output_key said --label_key answer",
        capsys,
    )
    assert code == 0, text
    assert "rewards   mean 0.375, " in text and "scores    mean 0.625, " in text
    assert "reward_part/right mean 0.5, " in text and "reward_part/same mean 0.5, " in text and "right/level" in text


def test_failures_are_counted_sample_by_sample_and_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(
        "test --remote_rm_url broken.py --dataset rows.jsonl --input_key question --label_key answer", capsys
    )
    assert code == 1
    assert "failures  4 of 40" in text and "ValueError: seven is not allowed" in text and "for row 7." in text
    assert "rewards   mean 1, " in text


def test_samples_of_a_dump_are_compared_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def sample(index: int) -> Trajectory:
        facts = {"prompt": "1+1=", "response": "2" if index else "3", "label": "2", "level": 5}
        mask = np.array([False, True])
        return Trajectory(0, 0, index, np.array([1, 2]), mask, None, np.where(mask, 0, -1), 1.0, 1.0, metadata=facts)

    writer = RolloutDumpWriter("dump")
    for step in (1, 2):
        writer.write(step, [sample(0), sample(1)])
    code, text = run("test --remote_rm_url right.py --load_rollouts dump --max_samples 3", capsys)
    assert code == 0, text
    assert "on 3 samples of dump" in text and "2 of 3 rewards differ from those in the dump" in text
    assert "rollout_step_00000001.jsonl prompt 0 sample 0, label '2'" in text


def test_null_is_no_response(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "1+1=", "answer": "2", "said": "2"}, {"question": "1+2=", "answer": None, "said": None}]
    Path("null.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "test --remote_rm_url right.py --dataset null.jsonl --input_key question --label_key answer"
    for more, column in (("", "answer"), (" --output_key said", "said")):
        code, text = run(flags + more, capsys)
        assert code == 1 and f"null.jsonl, row 1: column '{column}' is null" in text
    rows[1] |= {"said": "3"}  # a reward may do without a label
    Path("null.jsonl").write_text("".join(json.dumps(row | {"level": 0}) + "\n" for row in rows))
    code, text = run(f"{flags} --output_key said", capsys)
    assert code == 0 and "failures  0 of 2" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--remote_rm_url missing.py --dataset rows.jsonl --label_key answer --input_key question", "missing.py"),
        ("--remote_rm_url right.py --dataset rows.jsonl --label_key answer --input_key q", "no column for --input_key"),
        (
            "--remote_rm_url right.py --dataset rows.jsonl --label_key answer --input_key level",
            "row 0: column 'level' is a int, not a text",
        ),
        ("--remote_rm_url right.py --load_rollouts .", "has no samples in files rollout_step_"),
    ],
)
def test_what_is_missing_is_told(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(f"test {words}", capsys)
    assert code == 1 and text.startswith("error: ") and message in text
