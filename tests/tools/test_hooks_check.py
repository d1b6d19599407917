"""`openrlhf hooks check`: the flags of a run, its first prompts, made-up responses, and what the hooks make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf.cli.main import main
from openrlhf.utils.tiny_model import character_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples/python/hooks.py"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    character_tokenizer().save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "llama"}')
    rows = [{"input": f"{n}+1=", "answer": n + 1, "level": n} for n in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    flags = "--pretrain model --prompt_data rows.jsonl --label_key answer --n_samples_per_prompt 4 --max_len 64"
    code = main(["hooks", "check", *flags.split(), "--advantage_estimator", "group_norm", *words.split()])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_examples_pass(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(
        f"--custom_generate_function_path {EXAMPLES}:generate --custom_rm_path {EXAMPLES}:reward "
        f"--dynamic_sampling_filter_path {EXAMPLES}:keep --buffer_filter_path {EXAMPLES}:hardest_first",
        capsys,
    )
    assert code == 0, text
    assert "4 prompts of rows.jsonl with 4 made-up responses each" in text
    assert f"custom_rm_path  {EXAMPLES}:reward" in text and "samples   16, " in text
    assert "rewards   16, mean " in text and "logs      attempts" in text
    assert "groups    " in text and "of 4 groups" in text and "failures  0" in text
    code, text = run(f"--custom_rm_path {EXAMPLES}:group_reward --group_rm", capsys)
    assert code == 0 and "rewards   16, mean 0.75, 0 to 1.5" in text


BROKEN = """
async def generate(args, sample, sampling_params, *, llm_engine):
    sample.append((await llm_engine.generate(sample.tokens, sampling_params)).outputs[0].token_ids, sampled=True)
    return sample
def rm(args, sample):
    if sample.metadata["level"] == 2:
        raise KeyError("two")
    return 1.0
def keep(args, samples):
    return samples[0].metadata["gone"]
def select(args, groups, count):
    return [7]
"""


@pytest.mark.parametrize(
    ("flags", "failures", "message"),
    [
        ("--custom_rm_path h.py:rm", 4, "h.py:5 rm() raised KeyError: 'two' at {h}:7 for prompt 2 sample 0."),
        ("--custom_rm_path h.py:rm --reward_on_failure stop", None, "error: {h}:5 rm() raised KeyError: 'two' at"),
        ("--custom_generate_function_path h.py:generate", 1, "16 samples have no reward"),
        (
            f"--custom_rm_path {EXAMPLES}:reward --dynamic_sampling_filter_path h.py:keep",
            16,
            "prompt 0: {h}:9 keep() raised KeyError: 'gone' at {h}:10",
        ),
        (
            f"--custom_rm_path {EXAMPLES}:reward --buffer_filter_path h.py:select",
            1,
            "--buffer_filter_path: {h}:11 select() gave [7]; needed are 2 different indices below 4",
        ),
        ("--custom_rm_path h.py:select", None, "select() can't be called: missing a required argument: 'count'."),
        (f"--remote_rm_url {EXAMPLES}", None, "there is nothing to check: give any of --custom_generate_function_path"),
        (
            f"--custom_rm_path {EXAMPLES}:reward --max_images_per_prompt 1",
            None,
            "error: model is a model of type llama, which takes no images",
        ),
    ],
)
def test_mistakes_are_told_and_end_with_1(
    flags: str, failures: int | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("h.py").write_text(BROKEN)
    code, text = run(flags, capsys)
    assert code == 1
    assert message.replace("{h}", str(Path("h.py").absolute())) in text
    assert failures is None or f"failures  {failures}\n" in text


def test_the_word_check_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks"]) == 2
    assert "usage: openrlhf hooks check" in capsys.readouterr().err
