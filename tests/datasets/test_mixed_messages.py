"""Several sources whose messages have other names or keys: each row keeps what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_cases import letters, write_jsonl

from openrlhf.config import build
from openrlhf.datasets.prompts import load_prompts
from openrlhf.datasets.sft import build_sft_dataset
from openrlhf.datasets.sources import DataError, load_configured_rows, load_rows
from openrlhf.datasets.text import as_messages

SPOKEN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
CALLS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "1", "name": "f"},
    {"role": "assistant", "content": "yes"},
]
OTHER_CALL = [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": {"x": "t"}}}]}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
NUMBER = [{"role": "user", "content": "1"}]


def mixed(tmp_path: Path, *sources: dict[str, Any]) -> str:
    return ",".join(write_jsonl(tmp_path / f"{i}.jsonl", [row, row]) for i, row in enumerate(sources))


def sft(dataset: str, **flags: Any) -> Any:
    return build("train_sft", pretrain="m", dataset=dataset, input_key="messages", apply_chat_template=True, **flags)


def test_messages_with_other_names_and_keys_are_the_same_rows(tmp_path: Path) -> None:
    """One source says role and content, one from and value, and one calls the column conversations."""
    dataset = mixed(tmp_path, {"messages": SPOKEN}, {"messages": SHARED}, {"id": 7, "conversations": SHARED})
    cfg = sft(dataset)
    data = build_sft_dataset(load_configured_rows(cfg), cfg, letters(), dataset)
    assert len(data) == 6
    rows = data.fetch(range(6))
    assert {(tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in rows} == {
        (tuple(rows[0][0].tolist()), tuple(rows[0][1].tolist()))
    }


def test_messages_with_further_keys_beside_those_without(tmp_path: Path) -> None:
    talks = (SPOKEN, CALLS, OTHER_CALL, PARTS, NUMBER)
    rows = load_rows(mixed(tmp_path, *({"messages": talk} for talk in talks)))
    read = [as_messages(value, "user", "") for value in rows["messages"]]
    wanted = [[{"content": None, **message} for message in talk] for talk in talks]
    assert read == [talk for talk in wanted for _ in range(2)]


def test_prompts_of_both_kinds(tmp_path: Path) -> None:
    data = mixed(tmp_path, {"messages": SPOKEN[:1], "label": "a"}, {"conversations": SHARED[:1], "label": "b"})
    flags = {"remote_rm_url": "http://rm/", "input_key": "messages", "label_key": "label"}
    cfg = build("train_ppo_ray", pretrain="m", prompt_data=data, apply_chat_template=True, **flags)
    prompts = load_prompts(cfg, letters(), 99)
    assert {p.text for p in prompts} == {"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}
    assert [p.label for p in prompts] == ["a", "a", "b", "b"] and all(p.metadata == {} for p in prompts)


@pytest.mark.parametrize(
    "other", [{"text": "hi"}, {"conversations": SHARED, "talk": SPOKEN}, {"conversations": ["hi", "yes"]}]
)
def test_a_source_without_messages_that_can_be_told_is_named(tmp_path: Path, other: dict[str, Any]) -> None:
    dataset = mixed(tmp_path, {"messages": SPOKEN}, other)
    columns = ", ".join(other)
    with pytest.raises(
        DataError, match=rf"1\.jsonl has no column for --input_key 'messages'.*columns are: {columns}\."
    ):
        load_configured_rows(sft(dataset))


def test_a_text_beside_messages_is_no_column_of_one_type(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'messages' is in \S+0\.jsonl List.*; in \S+1\.jsonl Value"):
        load_configured_rows(sft(mixed(tmp_path, {"messages": SPOKEN}, {"messages": "hi"})))


def test_columns_that_are_not_read_may_be_missing(tmp_path: Path) -> None:
    dataset = mixed(tmp_path, {"messages": "a b", "out": "c"}, {"messages": "d e"})
    flags: dict[str, Any] = {"pretrain": "m", "dataset": dataset, "input_key": "messages", "output_key": "out"}
    rows = load_configured_rows(build("train_sft", pretrain_mode=True, **flags))
    assert list(rows["messages"]) == ["a b"] * 2 + ["d e"] * 2
    with pytest.raises(DataError, match="no column for --output_key 'out', which other sources have"):
        load_configured_rows(build("train_sft", **flags))


def test_an_unknown_speaker_is_told() -> None:
    with pytest.raises(DataError, match=r"row 3: message 0 needs the keys role and content, or from \(system, user, "):
        as_messages([{"from": "narrator", "value": "x"}], "user", "row 3")
