"""Rows of supervised fine-tuning: token ids, and which of them the loss is on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from datasets import Sequence as SequenceFeature
from transformers import PreTrainedTokenizerBase

from openrlhf.config import KTOConfig, SFTConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.order import ResumableOrder
from openrlhf.datasets.sources import DataError, require_columns, warn_of_tools
from openrlhf.datasets.tokenized import counted, tokenize_rows
from openrlhf.utils.continued import continued_ids
from openrlhf.utils.first_ids import first_ids
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

Row = tuple[np.ndarray, np.ndarray]

AHEAD_ROWS = 1_000_000
"""Up to this many rows become ids before the first step, which counts the usable ones and so the steps exactly."""
# rows of a larger source that are tried before the first step
_SAMPLE = 4096

EMPTY_PROMPT = "empty prompt"
EMPTY_RESPONSE = "empty response"
TOO_LONG = "prompt with its template takes all of --max_len"
FEATURES = Features(
    {
        "token_ids": SequenceFeature(Value("int32")),
        "loss_mask": SequenceFeature(Value("bool")),
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
    max_len: int
    multiturn: bool = False
    pretrain_mode: bool = False

    @classmethod
    def from_config(cls, cfg: SFTConfig | KTOConfig) -> SFTFormat:
        """The fields that ``cfg`` has under the same names."""
        return cls(**{name: getattr(cfg, name) for name in cls.__dataclass_fields__ if hasattr(cfg, name)})

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        named = (self.input_key, None if self.pretrain_mode else self.output_key)
        return [column for column in named if column is not None]


@dataclass(frozen=True)
class Tokenized:
    """One row. ``dropped`` is the reason why it can't be trained on, or empty."""

    token_ids: list[int]
    loss_mask: list[bool]
    dropped: str = ""

    @property
    def prompt(self) -> list[int]:
        """The ids before the answer."""
        return self.token_ids[: self.loss_mask.index(True)]


class SFTDataset:
    """Usable rows in the order of the source, all turned into ids beforehand.

    Attributes:
        num_usable: rows that can be trained on.
        dropped: number of unusable rows by reason.
    """

    def __init__(self, table: Dataset, dropped: dict[str, int]) -> None:
        self.dropped = dropped
        self.num_usable = len(table)
        self._rows = table.select_columns(["token_ids", "loss_mask"]).with_format("arrow")

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, order: ResumableOrder, count: int) -> list[int]:
        """The next rows to train on."""
        return order.take(count)

    def fetch(self, rows: Sequence[int]) -> list[Row]:
        """Token ids int32 ``[T]`` and loss mask bool ``[T]`` of some rows; the first token is in no mask."""
        if not rows:
            return []
        table = self._rows[list(rows)]
        ids, masks = (table.column(name).combine_chunks() for name in ("token_ids", "loss_mask"))
        ends = np.cumsum(ids.value_lengths().to_numpy())[:-1]
        columns = (np.split(column.flatten().to_numpy(zero_copy_only=False), ends) for column in (ids, masks))
        return list(zip(*columns, strict=True))


class LazySFTDataset:
    """Rows of the source, usable or not, each turned into ids when a step needs it, so that training starts at once.

    Attributes:
        num_usable: rows that can be trained on, estimated from a sample that is the same in every run.
        dropped: number of unusable rows met so far, by reason.

    Raises:
        DataError: a column has a null, or no row of the sample can be trained on.
    """

    def __init__(self, rows: Dataset, style: SFTFormat, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self._rows = rows.select_columns(style.columns)
        self._style, self._tokenizer, self._source = style, tokenizer, source
        self._held: dict[int, Tokenized] = {}
        _refuse_nulls(self._rows, source)
        sample = np.random.default_rng(0).choice(len(rows), min(_SAMPLE, len(rows)), replace=False)
        reasons = Counter(self._tokenize(int(row)).dropped for row in sample)
        kept = reasons.pop("", 0)
        if not kept:
            raise DataError(f"{source}: none of {len(sample)} rows tried can be trained on: {counted(reasons)}")
        self.num_usable = len(rows) * kept // len(sample)
        self.dropped: Counter[str] = Counter()
        logger.info(
            "%s: %d rows, turned into ids when a step needs them. %d of %d rows tried can be trained on, so about %d "
            "are. --dataloader_num_workers 1 or more turns all into ids first, and counts exactly",
            source,
            len(rows),
            kept,
            len(sample),
            self.num_usable,
        )

    def __len__(self) -> int:
        return len(self._rows)

    def _tokenize(self, row: int) -> Tokenized:
        return tokenize_sft_row(self._rows[row], f"{self._source}, row {row}", self._style, self._tokenizer)

    def take(self, order: ResumableOrder, count: int) -> list[int]:
        """The next rows to train on; those that can't be are skipped and counted."""
        return order.take(count, self._usable)

    def _usable(self, row: int) -> bool:
        done = self._tokenize(row)
        if not done.dropped:
            self._held[row] = done
            return True
        self.dropped[done.dropped] += 1
        total = self.dropped.total()
        if total == 10 ** (len(str(total)) - 1):  # 1, 10, 100, ...
            logger.warning("%s: row %d is left out, so far %s", self._source, row, counted(self.dropped))
        return False

    def fetch(self, rows: Sequence[int]) -> list[Row]:
        """Token ids int32 ``[T]`` and loss mask bool ``[T]`` of rows that were taken; the first token is in no mask."""
        parts = [self._held.pop(row) if row in self._held else self._tokenize(row) for row in rows]
        return [(np.array(part.token_ids, np.int32), np.array(part.loss_mask, np.bool_)) for part in parts]


def open_sft_dataset(
    rows: Dataset, cfg: SFTConfig, tokenizer: PreTrainedTokenizerBase, source: str = "the data"
) -> SFTDataset | LazySFTDataset:
    """Rows to train on: many are turned into ids when a step needs them, see :data:`AHEAD_ROWS`.

    Raises:
        DataError: see :func:`build_sft_dataset`.
    """
    if len(rows) > AHEAD_ROWS and not cfg.dataloader_num_workers:
        style = SFTFormat.from_config(cfg)
        check_sft_columns(rows, style, source)
        _warn_of_tools(rows, style, tokenizer, source)
        return LazySFTDataset(rows, style, tokenizer, source)
    return build_sft_dataset(rows, cfg, tokenizer, source)


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
    _warn_of_tools(rows, style, tokenizer, source)

    def tokenize(row: dict[str, Any], where: str) -> dict[str, Any]:
        # not asdict, which copies lists one element after another and takes longer than the tokenizer
        return vars(tokenize_sft_row(row, where, style, tokenizer))

    table, dropped = tokenize_rows(
        rows, tokenize, FEATURES, style=style, tokenizer=tokenizer, num_proc=cfg.dataloader_num_workers, source=source
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


def _warn_of_tools(rows: Dataset, style: SFTFormat, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    if style.apply_chat_template and not style.pretrain_mode:
        warn_of_tools(rows, tokenizer.chat_template, source)


def _refuse_nulls(rows: Dataset, source: str) -> None:
    """Raise a DataError for the first null, without looking at the texts."""
    start = 0
    for part in rows.with_format("arrow").iter(100_000):
        for column in rows.column_names:
            if part.column(column).null_count:
                row = start + pc.index(pc.is_null(part.column(column)), True).as_py()
                raise DataError(f"{source}, row {row}: column {column!r} is null")
        start += len(part)


def tokenize_sft_row(
    row: dict[str, Any], where: str, style: SFTFormat, tokenizer: PreTrainedTokenizerBase
) -> Tokenized:
    """One row as ids and mask.

    Args:
        where: the row, for messages.

    Raises:
        DataError: the row is null or malformed.
    """
    texts.require_values(row, style.columns, where)
    if style.pretrain_mode:
        ids = first_ids(tokenizer, texts.plain_text(row[style.input_key], where, style.input_key))
        return _finish(ids, [True] * len(ids), style.max_len, EMPTY_PROMPT)
    if style.apply_chat_template:
        return _chat(row, style, tokenizer, where)
    prompt = texts.plain_text(row[style.input_key], where, style.input_key)
    assert style.output_key is not None  # check_sft_columns
    response = texts.plain_text(row[style.output_key], where, style.output_key).rstrip("\n")
    if not prompt:
        return Tokenized([], [], EMPTY_PROMPT)
    if not response:
        return Tokenized([], [], EMPTY_RESPONSE)
    return _prompt_and_response(texts.apply_template(style.input_template, prompt), response, style, tokenizer)


def _prompt_and_response(prompt: str, response: str, style: SFTFormat, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """The prompt is tokenised as at generation time; the response goes on from there."""
    head = first_ids(tokenizer, prompt)
    whole = first_ids(tokenizer, prompt + response)
    if whole[: len(head)] == head and len(whole) > len(head):
        tail = whole[len(head) :]
    else:  # a token would straddle the border, which can't happen when the model continues the prompt
        tail = continued_ids(tokenizer, response)
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
    ids, mask = texts.encode_turns(tokenizer, messages, turns, where)
    return _finish(ids, mask, style.max_len, TOO_LONG)


def _finish(ids: list[int], mask: list[bool], max_len: int, reason: str) -> Tokenized:
    """Cut to the limit; a row whose mask is empty then is dropped. Nothing predicts the first token."""
    ids, mask = ids[:max_len], mask[:max_len]
    if mask:
        mask[0] = False
    return Tokenized(ids, mask) if any(mask) else Tokenized([], [], reason)
