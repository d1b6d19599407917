"""Prompts for reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_cases import letters, write_jsonl

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow, load_prompts
from openrlhf.datasets.sources import DataError


def prompts(path: Path, rows: list[dict[str, Any]], max_tokens: int = 100, **changes: Any) -> list[PromptRow]:
    tokenizer = changes.pop("tokenizer", None) or letters()
    cfg = PPOConfig(prompt_data=write_jsonl(path / "p.jsonl", rows), **changes)
    return load_prompts(cfg, tokenizer, max_tokens)


def test_plain_prompts_with_label_source_and_other_columns(tmp_path: Path) -> None:
    rows = [{"input": "1+1=", "gt": 2, "datasource": "easy", "level": 3}, {"input": "2", "gt": 5, "level": None}]
    first, second = prompts(tmp_path, rows, label_key="gt")
    assert (first.prompt_id, first.text, first.label, first.datasource) == (0, "1+1=", 2, "easy")
    assert first.metadata == {"level": 3}
    assert (second.prompt_id, second.datasource, second.metadata) == (1, "default", {})
    assert letters().decode(first.token_ids) == "1+1="


def test_label_is_an_empty_text_without_the_flag(tmp_path: Path) -> None:
    assert prompts(tmp_path, [{"input": "a", "label": "b"}])[0].label == ""


def test_input_template_and_one_bos(tmp_path: Path) -> None:
    tokenizer = letters(adds_bos=True)
    (row,) = prompts(tmp_path, [{"input": "a"}], input_template="Q: {}\nA:", tokenizer=tokenizer)
    assert row.text == "Q: a\nA:"
    assert tokenizer.decode(row.token_ids) == "<bos>Q: a\nA:"


@pytest.mark.parametrize("value", ["hi", [{"role": "user", "content": "hi"}]])
def test_chat_template_ends_with_the_head_of_the_answer(tmp_path: Path, value: Any) -> None:
    tokenizer = letters(adds_bos=True)
    (row,) = prompts(tmp_path, [{"input": value}], apply_chat_template=True, tokenizer=tokenizer)
    assert row.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row.token_ids) == row.text


def test_long_prompts_lose_their_beginning_or_are_dropped(tmp_path: Path) -> None:
    rows = [{"input": "abcdef"}, {"input": "xy"}]
    cut = prompts(tmp_path, rows, max_tokens=4)
    assert [letters().decode(p.token_ids) for p in cut] == ["cdef", "xy"]
    assert cut[0].text == "abcdef"
    dropped = prompts(tmp_path, rows, max_tokens=4, prompt_overlong="drop")
    assert [(p.prompt_id, p.text) for p in dropped] == [(1, "xy")]
    with pytest.raises(DataError, match="all 2 prompts are longer than 1 tokens"):
        prompts(tmp_path, rows, max_tokens=1, prompt_overlong="drop")


def test_labels_stay_with_their_prompts_when_one_between_them_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "x" * length, "gt": length} for length in (5, 30, 16)]
    kept = prompts(tmp_path, rows, max_tokens=16, label_key="gt", prompt_overlong="drop")
    assert [(p.prompt_id, len(p.token_ids), p.label) for p in kept] == [(0, 5, 5), (2, 16, 16)]
    assert "0 prompts cut to 16 tokens, 1 left out" in caplog.text


@pytest.mark.parametrize(
    ("rows", "changes", "text"),
    [
        ([{"input": "a"}, {"input": None}], {}, "row 1: column 'input' is null"),
        ([{"input": "a"}, {"input": ""}], {}, "row 1: column 'input' is empty"),
        ([{"input": ["a"]}], {}, "row 0: column 'input' is a list.*--apply_chat_template"),
        ([{"question": "a", "answer": "b"}], {"label_key": "gt"}, "--input_key 'input', --label_key 'gt'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        prompts(tmp_path, rows, **changes)


def test_evaluation_prompts_come_from_their_own_source_and_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "e.jsonl", [{"input": "e"}])
    cfg = PPOConfig(prompt_data="unused.jsonl", eval_dataset=path, eval_split="train")
    assert [p.text for p in load_prompts(cfg, letters(), 10, evaluation=True)] == ["e"]
    with pytest.raises(DataError, match="--eval_dataset is not given"):
        load_prompts(PPOConfig(prompt_data=path), letters(), 10, evaluation=True)
