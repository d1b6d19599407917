"""Rows of supervised fine-tuning: token ids, and which of them the loss is on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as SequenceFeature
from transformers import PreTrainedTokenizerBase

from openrlhf.config import SFTConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.sources import DataError, require_columns
from openrlhf.datasets.tokenized import number_column, tokenize_rows

EMPTY_PROMPT = "empty prompt"
EMPTY_RESPONSE = "empty response"
TOO_LONG = "prompt fills max_len"
_FEATURES = Features(
    {
        "token_ids": SequenceFeature(Value("int32")),
        "loss_mask": SequenceFeature(Value("bool")),
        "length": Value("int64"),
        "num_targets": Value("int64"),
        "dropped": Value("string"),
    }
)


@dataclass(frozen=True)
class SFTFormat:
    """How a row becomes text; see the flags of the same names."""

    input_key: str
    output_key: str | None
    input_template: str | None
    apply_chat_template: bool
    multiturn: bool
    pretrain_mode: bool
    max_len: int

    @classmethod
    def from_config(cls, cfg: SFTConfig) -> SFTFormat:
        """The fields that ``cfg`` has under the same names."""
        return cls(**{name: getattr(cfg, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Tokenized:
    """One row. ``dropped`` is the reason why it can't be trained on, or empty."""

    token_ids: list[int]
    loss_mask: list[bool]
    dropped: str = ""


class SFTDataset:
    """Usable rows in the order of the source.

    Attributes:
        lengths: int64 ``[num_rows]``, tokens of each row.
        num_targets: int64 ``[num_rows]``, tokens of each row that the loss is on.
        dropped: number of unusable rows by reason.
    """

    def __init__(self, table: Dataset, dropped: dict[str, int]) -> None:
        self.dropped = dropped
        self._rows = table.with_format("numpy", columns=["token_ids", "loss_mask"])
        self.lengths = number_column(table, "length")
        self.num_targets = number_column(table, "num_targets")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 ``[T]`` and loss mask bool ``[T]``; the first token is never in the mask."""
        row = self._rows[index]
        return row["token_ids"].astype(np.int32), row["loss_mask"]

    def fetch(self, indices: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Several rows."""
        return [self[i] for i in indices]


def build_sft_dataset(
    rows: Dataset, cfg: SFTConfig, tokenizer: PreTrainedTokenizerBase, source: str = "the data"
) -> SFTDataset:
    """Turn all rows into ids and masks.

    Rows without anything to learn from (empty, or a prompt as long as ``max_len``) are dropped and counted.

    Raises:
        DataError: a column is missing, or a row is null or malformed (its number is named), or nothing is left.
    """
    style = SFTFormat.from_config(cfg)
    check_sft_columns(rows, style, source)
    if style.multiturn and not style.apply_chat_template:
        raise DataError("--multiturn needs --apply_chat_template")

    def tokenize(row: dict[str, Any], index: int) -> dict[str, Any]:
        done = tokenize_sft_row(row, index, style, tokenizer, source)
        # not asdict, which copies lists one element after another and takes longer than the tokenizer
        return {**vars(done), "length": len(done.token_ids), "num_targets": sum(done.loss_mask)}

    table, dropped = tokenize_rows(
        rows,
        tokenize,
        _FEATURES,
        style=style,
        tokenizer=tokenizer,
        num_proc=cfg.dataloader_num_workers,
        source=source,
    )
    return SFTDataset(table, dropped)


def check_sft_columns(rows: Dataset, style: SFTFormat, source: str) -> None:
    """Raise a DataError when a column that the flags name is missing."""
    output = None if style.pretrain_mode else style.output_key
    require_columns(rows, {"input_key": style.input_key, "output_key": output}, source)
    if output is None and not (style.pretrain_mode or style.apply_chat_template):
        raise DataError(
            f"{source}: give --output_key, --apply_chat_template or --pretrain_mode; without any of them there is no "
            "response to learn"
        )


def tokenize_sft_row(
    row: dict[str, Any], index: int, style: SFTFormat, tokenizer: PreTrainedTokenizerBase, source: str = "the data"
) -> Tokenized:
    """One row as ids and mask.

    Raises:
        DataError: the row is null or malformed.
    """
    where = f"{source}, row {index}"
    for column in (style.input_key, None if style.pretrain_mode else style.output_key):
        if column is not None and row[column] is None:
            raise DataError(f"{where}: column {column!r} is null")
    if style.pretrain_mode:
        ids = texts.encode(tokenizer, _text(row[style.input_key], where, style.input_key))
        return _finish(ids, [True] * len(ids), style.max_len, EMPTY_PROMPT)
    if style.apply_chat_template:
        return _chat(row, style, tokenizer, where)
    prompt = _text(row[style.input_key], where, style.input_key)
    assert style.output_key is not None  # check_sft_columns
    response = _text(row[style.output_key], where, style.output_key).rstrip("\n")
    if not prompt:
        return Tokenized([], [], EMPTY_PROMPT)
    if not response:
        return Tokenized([], [], EMPTY_RESPONSE)
    return _prompt_and_response(texts.apply_template(style.input_template, prompt), response, style, tokenizer)


def _text(value: Any, where: str, column: str) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} is a {type(value).__name__}, not a text; lists of messages need "
            "--apply_chat_template"
        )
    return value


def _prompt_and_response(prompt: str, response: str, style: SFTFormat, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """The prompt is tokenised as at generation time; the response goes on from there."""
    head = texts.encode(tokenizer, prompt)
    whole = texts.encode(tokenizer, prompt + response)
    if whole[: len(head)] == head and len(whole) > len(head):
        tail = whole[len(head) :]
    else:  # a token would straddle the border, which can't happen when the model continues the prompt
        tail = list(tokenizer(response, add_special_tokens=False)["input_ids"])
    if tail[-1:] != [tokenizer.eos_token_id]:
        tail = [*tail, tokenizer.eos_token_id]
    return _finish(head + tail, [False] * len(head) + [True] * len(tail), style.max_len, TOO_LONG)


def _chat(row: dict[str, Any], style: SFTFormat, tokenizer: PreTrainedTokenizerBase, where: str) -> Tokenized:
    messages = texts.as_messages(row[style.input_key], "user", where)
    if style.output_key is not None:
        messages = messages + texts.as_messages(row[style.output_key], "assistant", where)
    if len(messages) < 2:
        return Tokenized([], [], EMPTY_RESPONSE if messages else EMPTY_PROMPT)
    speaks = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if style.multiturn:
        turns = [i for i in speaks if i > 0]
    elif messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message is from {messages[-1]['role']!r}; its answer should come last")
    else:
        turns = [len(messages) - 1]
    turns = [i for i in turns if messages[i]["content"] or messages[i].get("tool_calls")]
    if not turns:
        return Tokenized([], [], EMPTY_RESPONSE)
    text, spans = texts.assistant_spans(tokenizer, messages, turns, where)
    ids, mask = texts.encode_spans(tokenizer, text, spans)
    if ids and ids[-1] != tokenizer.eos_token_id:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return _finish(ids, mask, style.max_len, TOO_LONG)


def _finish(ids: list[int], mask: list[bool], max_len: int, reason: str) -> Tokenized:
    """Cut to the limit; a row whose mask is empty then is dropped. Nothing predicts the first token."""
    ids, mask = ids[:max_len], mask[:max_len]
    if mask:
        mask[0] = False
    return Tokenized(ids, mask) if any(mask) else Tokenized([], [], reason)
