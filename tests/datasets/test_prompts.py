"""Prompts for reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_cases import BOS_TEMPLATE, CHATML, letters, write_jsonl
from datasets import Dataset

from openrlhf.config import PPOConfig, build
from openrlhf.datasets.prompts import PromptRow, load_prompts
from openrlhf.datasets.sources import DataError
from openrlhf.tools.batch_inference import prompts_to_generate


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


TOOLS = (
    "{% for tool in tools or [] %}<{{ tool['name'] }}{{ tool['args'] | length }}>{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
)


def test_metadata_and_tools_columns(tmp_path: Path) -> None:
    tools = [{"name": "add", "args": {"x": 1}}, {"name": "mul", "args": {"y": 1, "z": 2}}]
    rows = [
        {"input": "1+1=", "level": 3, "facts": {"datasource": "easy", "deep": {"a": 1}}, "api": tools},
        {"input": "2", "level": 4, "facts": {"deep": {"b": 2}}, "api": None},
        {"input": "3", "level": 5, "facts": None, "api": tools[:1]},
    ]
    flags: dict[str, Any] = {"metadata_key": "facts", "tool_key": "api", "apply_chat_template": True}
    first, second, third = prompts(tmp_path, rows, tokenizer=letters(TOOLS), **flags)
    # Nothing is left of the keys of other rows, which columns of structs fill with None.
    assert first.metadata == {"level": 3, "datasource": "easy", "deep": {"a": 1}, "tools": tools}
    assert (first.text, first.datasource) == ("<add1><mul2>1+1=", "easy")
    assert (second.metadata, second.text, second.datasource) == ({"level": 4, "deep": {"b": 2}}, "2", "default")
    assert third.text == "<add1>3"
    as_text = [{**row, "facts": json.dumps(row["facts"]), "api": json.dumps(row["api"])} for row in rows]
    assert prompts(tmp_path, as_text, tokenizer=letters(TOOLS), **flags) == [first, second, third]


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


@pytest.mark.parametrize(
    "flags, template, kept",
    [
        ({}, None, ["<bos>cdef", "<bos>xy"]),
        ({"apply_chat_template": True}, BOS_TEMPLATE, ["<bos>[a]", "<bos>[a]"]),
        ({"apply_chat_template": True}, CHATML, ["ant\n", "ant\n"]),
    ],
)
def test_prompts_that_are_cut_keep_their_bos(
    tmp_path: Path, flags: dict[str, Any], template: str | None, kept: list[str]
) -> None:
    tokenizer = letters(template, adds_bos=True)
    limit = 5 if not flags else 4
    cut = prompts(tmp_path, [{"input": "abcdef"}, {"input": "xy"}], max_tokens=limit, tokenizer=tokenizer, **flags)
    assert [tokenizer.decode(p.token_ids) for p in cut] == kept


@pytest.mark.parametrize("more, suffix", [({}, ""), ({"enable_csft": True, "csft_prompt": "="}, " = ")])
def test_prompts_of_a_batch_that_are_cut_keep_their_bos(more: dict[str, Any], suffix: str) -> None:
    flags = {"eval_task": "generate_vllm", "pretrain": "m", "dataset": "d", "output_path": "o", "prompt_max_len": 8}
    data = Dataset.from_list([{"input": "12"}, {"input": "12345678"}])
    ends = ["12" + suffix, ("12345678" + suffix)[-7:]]
    tokenizer = letters(None, adds_bos=True)
    told = prompts_to_generate(build("batch_inference", **flags, **more), data, tokenizer)
    assert [tokenizer.decode(ids) for _, _, ids in told] == ["<bos>" + end for end in ends]
    assert [text for _, text, _ in told] == ends
    told = prompts_to_generate(build("batch_inference", **flags, **more, input_template="<bos>{}"), data, tokenizer)
    assert [text for _, text, _ in told] == [tokenizer.decode(ids) for _, _, ids in told] == ["<bos>" + e for e in ends]


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
        ([{"input": "a"}], {"metadata_key": "facts"}, "--metadata_key 'facts'"),
        ([{"input": "a", "m": 1}], {"metadata_key": "m"}, "row 0: .*'m'.* int, not a dict"),
        ([{"input": "a", "m": "no json"}], {"metadata_key": "m"}, "row 0: column 'm'.* is a str, not a dict"),
        ([{"input": "a", "t": "{}"}, {"input": "a", "t": '["x"]'}], {"tool_key": "t"}, "row 1: .*'t'.* list of dicts"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        prompts(tmp_path, rows, **changes)


def test_evaluation_prompts_come_from_their_own_source_and_split(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "e.jsonl", [{"input": "e"}])
    cfg = PPOConfig(prompt_data="unused.jsonl", eval_dataset=path, eval_split="train")
    assert [p.text for p in load_prompts(cfg, letters(), 10, evaluation=True)] == ["e"]
