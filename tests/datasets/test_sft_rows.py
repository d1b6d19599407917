"""Rows of SFT: which tokens, and exactly which of them are learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import BOS_TEMPLATE, letters, merging
from datasets import Dataset

from openrlhf.config import SFTConfig
from openrlhf.datasets import sft
from openrlhf.datasets.order import ResumableOrder
from openrlhf.datasets.sft import (
    EMPTY_PROMPT,
    EMPTY_RESPONSE,
    TOO_LONG,
    LazySFTDataset,
    SFTDataset,
    SFTFormat,
    Tokenized,
    build_sft_dataset,
    open_sft_dataset,
    tokenize_sft_row,
)
from openrlhf.datasets.sources import DataError, load_rows

USER, ASSISTANT = "user", "assistant"


def style(**changes: Any) -> SFTFormat:
    values: dict[str, Any] = {
        "input_key": "input",
        "output_key": "output",
        "input_template": None,
        "apply_chat_template": False,
        "multiturn": False,
        "pretrain_mode": False,
        "max_len": 100,
    }
    return SFTFormat(**{**values, **changes})


def learnt(row: Tokenized, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m])


def message(role: str, content: str | None) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_exactly_the_response_and_one_eos_are_learnt() -> None:
    """Prompt of 3, response of 3 and EOS."""
    tokenizer = letters(eos="<eos>")
    row = tokenize_sft_row({"input": "abc", "output": "def"}, "row 0", style(), tokenizer)
    assert tokenizer.decode(row.token_ids) == "abcdef<eos>"
    assert row.loss_mask == [False] * 3 + [True] * 4
    cut = tokenize_sft_row({"input": "abc", "output": "def"}, "row 0", style(max_len=5), tokenizer)
    assert tokenizer.decode(cut.token_ids) == "abcde" and sum(cut.loss_mask) == 2


def test_eos_that_is_there_is_not_doubled() -> None:
    tokenizer = letters(eos="<eos>")
    row = tokenize_sft_row({"input": "a", "output": "b<eos>\n"}, "row 0", style(), tokenizer)
    assert tokenizer.decode(row.token_ids) == "ab<eos>"


def test_input_template_goes_round_the_prompt() -> None:
    tokenizer = letters(eos="<eos>")
    row = tokenize_sft_row(
        {"input": "hi", "output": "ho"}, "row 0", style(input_template="User: {}\nAssistant: "), tokenizer
    )
    assert tokenizer.decode(row.token_ids) == "User: hi\nAssistant: ho<eos>"
    assert learnt(row, tokenizer) == "ho<eos>"


def test_other_braces_of_the_input_template_are_text() -> None:
    tokenizer = letters(eos="<eos>")
    row = tokenize_sft_row(
        {"input": "{}{x}", "output": "}"}, "row 0", style(input_template='{"q": {}, {y}}'), tokenizer
    )
    assert tokenizer.decode(row.token_ids) == '{"q": {}{x}, {y}}}<eos>'


def test_prompt_is_tokenised_as_at_generation_time() -> None:
    """A token over the border of prompt and response can't be sampled, so it isn't trained on."""
    tokenizer = merging("xy")
    row = tokenize_sft_row({"input": "ax", "output": "yb"}, "row 0", style(), tokenizer)
    prompt = tokenizer("ax", add_special_tokens=False)["input_ids"]
    assert row.token_ids[: len(prompt)] == prompt
    assert len(row.token_ids) == 5 and row.loss_mask == [False, False, True, True, True]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_without_a_template(adds_bos: bool) -> None:
    tokenizer = letters(eos="<eos>", adds_bos=adds_bos)
    row = tokenize_sft_row({"input": "ab", "output": "c"}, "row 0", style(), tokenizer)
    assert row.token_ids.count(tokenizer.bos_token_id) == int(adds_bos)
    assert (row.token_ids[0] == tokenizer.bos_token_id) is adds_bos
    given = tokenize_sft_row({"input": "<bos>ab", "output": "c"}, "row 0", style(), tokenizer)
    assert given.token_ids.count(tokenizer.bos_token_id) == 1
    assert learnt(given, tokenizer) == "c<eos>"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_with_a_template_that_writes_it(adds_bos: bool) -> None:
    tokenizer = letters(BOS_TEMPLATE, eos="<eos>", adds_bos=adds_bos)
    row = tokenize_sft_row({"input": "ab", "output": "c"}, "row 0", style(apply_chat_template=True), tokenizer)
    assert row.token_ids.count(tokenizer.bos_token_id) == 1 and row.token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(row.token_ids) == "<bos>[u]ab<eos>[a]c<eos>"
    assert learnt(row, tokenizer) == "c<eos>"


@pytest.mark.parametrize(
    "row",
    [
        {"input": "q", "output": "a!"},
        {"input": [message(USER, "q")], "output": [message(ASSISTANT, "a!")]},
        {"input": [message(USER, "q")], "output": "a!"},
    ],
)
def test_chat_template_forms_of_a_row(row: dict[str, Any]) -> None:
    tokenizer = letters()
    got = tokenize_sft_row(row, "row 0", style(apply_chat_template=True), tokenizer)
    assert tokenizer.decode(got.token_ids) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na!<|im_end|>"
    assert learnt(got, tokenizer) == "a!<|im_end|>"


def test_whole_conversation_in_one_column_learns_the_last_turn() -> None:
    tokenizer = letters()
    talk = [message(USER, "a"), message(ASSISTANT, "b"), message(USER, "c"), message(ASSISTANT, "d")]
    got = tokenize_sft_row({"input": talk}, "row 0", style(apply_chat_template=True, output_key=None), tokenizer)
    assert learnt(got, tokenizer) == "d<|im_end|>"
    every = tokenize_sft_row(
        {"input": talk}, "row 0", style(apply_chat_template=True, output_key=None, multiturn=True), tokenizer
    )
    assert every.token_ids == got.token_ids
    assert learnt(every, tokenizer) == "b<|im_end|>d<|im_end|>"


def test_end_token_of_the_turn_is_learnt_and_eos_added_when_it_is_another() -> None:
    tokenizer = letters(eos="<eos>")
    got = tokenize_sft_row({"input": "q", "output": "a"}, "row 0", style(apply_chat_template=True), tokenizer)
    assert learnt(got, tokenizer) == "a<|im_end|><eos>"


def test_multiturn_row_with_a_long_last_prompt_keeps_its_first_answer() -> None:
    """The first answer's 4 tokens and its end token."""
    tokenizer = letters(BOS_TEMPLATE, eos="<eos>")
    talk = [message(USER, "abc"), message(ASSISTANT, "defg"), message(USER, "x" * 40), message(ASSISTANT, "yz")]
    row = tokenize_sft_row(
        {"input": talk},
        "row 0",
        style(apply_chat_template=True, output_key=None, multiturn=True, max_len=25),
        tokenizer,
    )
    assert not row.dropped and learnt(row, tokenizer) == "defg<eos>" and len(row.token_ids) == 25


TOOLS_TEMPLATE = (
    "{% for m in messages %}{% set before = messages[loop.index0 - 1]['role'] if loop.index0 else '' %}"
    "{% if m['role'] != 'tool' %}{{ '[' + m['role'] + ']' }}{% elif before != 'tool' %}{{ '[user]' }}{% endif %}"
    "{% if m['content'] is not none %}{{ m['content'] }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}{{ '<' + call['name'] + '>' }}{% endfor %}"
    "{% if m['role'] != 'tool' or loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize("content", [None, "", "wait"])
def test_results_of_tools_are_rendered_as_one_conversation(content: str | None) -> None:
    """The template puts consecutive results into one turn of the user; an answer of calls alone has no content."""
    tokenizer = letters(TOOLS_TEMPLATE, eos="<eos>")
    calls = {"role": ASSISTANT, "content": content, "tool_calls": [{"name": "f"}, {"name": "g"}]}
    talk = [message(USER, "q"), calls, message("tool", "1"), message("tool", "2"), message(ASSISTANT, "3")]
    how = style(apply_chat_template=True, output_key=None, multiturn=True)
    row = tokenize_sft_row({"input": talk}, "row 0", how, tokenizer)
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert row.token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == f"[user]q<eos>[assistant]{content or ''}<f><g><eos>[user]12<eos>[assistant]3<eos>"
    assert learnt(row, tokenizer) == f"{content or ''}<f><g><eos>3<eos>"


def test_keys_of_other_rows_are_not_learnt(tmp_path: Path) -> None:
    """A column of structs has every key in every row, at every depth."""
    calls = [{"name": "f", "arguments": given} for given in ({"city": "Paris"}, {"a": 1, "b": [{"c": 2}, {"d": 3}]})]
    talks = [[message(USER, "q"), {"role": ASSISTANT, "tool_calls": [call]}] for call in calls]
    Dataset.from_list([{"input": talk} for talk in talks]).to_parquet(tmp_path / "rows.parquet")
    template = "{% for m in messages %}{{ m.content or (m.tool_calls | tojson) }}{{ eos_token }}{% endfor %}"
    tokenizer = letters(template, eos="<eos>")
    for row, call in zip(load_rows(str(tmp_path / "rows.parquet")), calls, strict=True):
        got = tokenize_sft_row(row, "row 0", style(apply_chat_template=True, output_key=None), tokenizer)
        assert json.loads(learnt(got, tokenizer).removesuffix("<eos>")) == [call]


def test_slow_tokenizer_gives_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = [message(USER, "a"), message(ASSISTANT, "b"), message(USER, "c"), message(ASSISTANT, "d")]
    how = style(apply_chat_template=True, output_key=None, multiturn=True)
    fast = tokenize_sft_row({"input": talk}, "row 0", how, letters())
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.is_fast", property(lambda self: False))
    assert tokenize_sft_row({"input": talk}, "row 0", how, letters()) == fast


def test_template_that_rewrites_earlier_turns_is_refused_for_multiturn() -> None:
    template = (
        "{% for m in messages %}{{ '[' + (m['content'] if loop.last else 'old') + ']' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
    )
    talk = [message(USER, "a"), message(ASSISTANT, "b"), message(USER, "c"), message(ASSISTANT, "d")]
    with pytest.raises(DataError, match="row 3: the chat template rewrites earlier turns"):
        tokenize_sft_row(
            {"input": talk},
            "row 3",
            style(apply_chat_template=True, output_key=None, multiturn=True),
            letters(template),
        )


def test_pretraining_learns_every_token_and_adds_no_eos() -> None:
    tokenizer = letters(eos="<eos>", adds_bos=True)
    row = tokenize_sft_row({"input": "abc"}, "row 0", style(pretrain_mode=True, input_template="X{}"), tokenizer)
    assert tokenizer.decode(row.token_ids) == "<bos>abc" and row.loss_mask == [False, True, True, True]


@pytest.mark.parametrize(
    ("row", "changes", "reason"),
    [
        ({"input": "", "output": "a"}, {}, EMPTY_PROMPT),
        ({"input": "a", "output": ""}, {}, EMPTY_RESPONSE),
        ({"input": "a", "output": "\n"}, {}, EMPTY_RESPONSE),
        ({"input": "abcdef", "output": "ghi"}, {"max_len": 4}, TOO_LONG),
        ({"input": "q", "output": ""}, {"apply_chat_template": True}, EMPTY_RESPONSE),
        ({"input": [], "output": []}, {"apply_chat_template": True}, EMPTY_PROMPT),
        ({"input": "a", "output": ""}, {"pretrain_mode": True}, EMPTY_PROMPT),
    ],
)
def test_rows_without_anything_to_learn_are_dropped_with_the_reason(
    row: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    got = tokenize_sft_row(row, "row 0", style(**changes), letters())
    assert (got.dropped, got.token_ids, got.loss_mask) == (reason, [], [])


@pytest.mark.parametrize(
    ("row", "changes", "text"),
    [
        ({"input": None, "output": "a"}, {}, "row 7: column 'input' is null"),
        ({"input": "a", "output": None}, {}, "row 7: column 'output' is null"),
        ({"input": ["a"], "output": "b"}, {}, "row 7: column 'input' is a list.*--apply_chat_template"),
        ({"input": [{"content": "a"}], "output": "b"}, {"apply_chat_template": True}, "row 7: message 0 needs"),
        ({"input": [message(USER, None)], "output": "b"}, {"apply_chat_template": True}, "row 7: message 0 needs"),
        ({"input": 5, "output": "b"}, {"apply_chat_template": True}, "row 7: expected a text or a list"),
        (
            {"input": [message(ASSISTANT, "x"), message(USER, "a")]},
            {"apply_chat_template": True, "output_key": None},
            "row 7: the last message is from 'user'",
        ),
    ],
)
def test_malformed_rows_are_named(row: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        tokenize_sft_row(row, "row 7", style(**changes), letters())


def test_missing_chat_template_is_told() -> None:
    with pytest.raises(DataError, match="no chat template"):
        tokenize_sft_row({"input": "a", "output": "b"}, "row 0", style(apply_chat_template=True), letters(None))


# -------------------------------------------------------------------------------------------------------- whole tables

ROWS = [
    {"input": "abc", "output": "de"},
    {"input": "", "output": "x"},
    {"input": "f", "output": "ghi"},
    {"input": "y" * 30, "output": "z"},
    {"input": "k", "output": ""},
]


def config(**changes: Any) -> SFTConfig:
    return SFTConfig(input_key="input", output_key="output", input_template=None, max_len=12, **changes)


@pytest.mark.parametrize("workers", [0, 2])
def test_dataset_counts_what_it_drops(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = letters(eos="<eos>")
    data = build_sft_dataset(Dataset.from_list(ROWS), config(dataloader_num_workers=workers), tokenizer)
    assert data.dropped == {EMPTY_PROMPT: 1, EMPTY_RESPONSE: 1, TOO_LONG: 1}
    assert len(data) == data.num_usable == 2
    (first, _), (ids, mask) = data.fetch([0, 1])
    assert tokenizer.decode(first) == "abcde<eos>"
    assert ids.dtype == np.int32 and mask.dtype == np.bool_
    assert tokenizer.decode(ids) == "fghi<eos>" and mask.tolist() == [False, True, True, True, True]
    assert [len(ids) for ids, _ in data.fetch([1, 0])] == [5, 6]


def test_dataset_without_a_usable_row() -> None:
    with pytest.raises(DataError, match="none of the 1 rows"):
        build_sft_dataset(Dataset.from_list(ROWS[1:2]), config(), letters())


def test_missing_column_and_missing_response() -> None:
    rows = Dataset.from_list([{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="--input_key 'input', --output_key 'output'.*question, answer"):
        build_sft_dataset(rows, config(), letters())
    nothing = SFTConfig(input_key="question", input_template=None)
    with pytest.raises(DataError, match="--output_key, --apply_chat_template or --pretrain_mode"):
        build_sft_dataset(rows, nothing, letters())


class TestRowsOnDemand:
    """Sources too large to be turned into ids first."""

    @staticmethod
    def lazy(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> LazySFTDataset:
        monkeypatch.setattr(sft, "AHEAD_ROWS", 4)
        data = open_sft_dataset(Dataset.from_list(rows), config(**changes), letters(eos="<eos>"))
        assert isinstance(data, LazySFTDataset)
        return data

    @staticmethod
    def batches(data: Any, order: ResumableOrder, count: int) -> list[list[tuple[list[int], list[bool]]]]:
        """Batches of 3 as ids and masks."""
        taken = [data.fetch(data.take(order, 3)) for _ in range(count)]
        return [[(ids.tolist(), mask.tolist()) for ids, mask in batch] for batch in taken]

    def test_batches_are_those_of_rows_tokenized_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = [{"input": "abcdefg"[: 1 + i % 7], "output": "hijkl"[: 1 + i % 5]} for i in range(10)]
        data = self.lazy(rows, monkeypatch)
        ahead = open_sft_dataset(Dataset.from_list(rows), config(dataloader_num_workers=1), letters(eos="<eos>"))
        assert isinstance(ahead, SFTDataset) and data.num_usable == len(data) == len(ahead) == 10
        mine, theirs = (self.batches(each, ResumableOrder(10, 5), 8) for each in (data, ahead))
        assert mine == theirs and len({str(batch) for batch in mine}) == 8

    def test_unusable_rows_are_skipped_and_counted(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = self.lazy(ROWS, monkeypatch)
        assert len(data) == 5 and data.num_usable == 2 and data.dropped == {}
        order = ResumableOrder(len(data), seed=0)
        expected = [row for row in ResumableOrder(5, seed=0).take(10) if row in (0, 2)]
        assert data.take(order, 4) == expected[:4]
        assert order.consumed - order.skipped == 4 and data.dropped.total() == order.skipped
        taken_up = ResumableOrder(5, seed=0)
        taken_up.load_state_dict(order.state_dict())
        assert data.take(taken_up, 4) == data.take(order, 4)
        assert taken_up.skipped == order.skipped
        assert "1 x " in caplog.text and "row" in caplog.text

    def test_usable_rows_are_estimated_from_a_sample(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sft, "_SAMPLE", 40)
        rows = [{"input": "a", "output": "b" if i % 2 else ""} for i in range(400)]
        first, second = self.lazy(rows, monkeypatch), self.lazy(rows, monkeypatch)
        assert 100 < first.num_usable == second.num_usable < 300 and first.num_usable % 10 == 0

    def test_bad_rows_are_told_before_the_first_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(DataError, match="row 3: column 'output' is null"):
            self.lazy([{"input": "a", "output": None if i == 3 else "b"} for i in range(9)], monkeypatch)
        with pytest.raises(DataError, match="none of 6 rows tried can be trained on: 6 x empty response"):
            self.lazy([{"input": "a", "output": ""}] * 6, monkeypatch)

    def test_no_endless_search(self) -> None:
        with pytest.raises(DataError, match="none of the 3 rows"):
            ResumableOrder(3, seed=0).take(1, lambda row: False)
