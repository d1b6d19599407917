"""Rows of two answers to one prompt, the better and the worse, for reward models and DPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as SequenceFeature
from transformers import PreTrainedTokenizerBase

from openrlhf.config import DPOConfig, RMConfig
from openrlhf.datasets import text as texts
from openrlhf.datasets.sft import EMPTY_PROMPT, EMPTY_RESPONSE, TOO_LONG, SFTFormat, Tokenized, tokenize_sft_row
from openrlhf.datasets.sources import DataError, require_columns, warn_of_tools
from openrlhf.datasets.tokenized import number_column, tokenize_rows

MARGIN = "margin"
IDENTICAL = "chosen and rejected are the same"
IDENTICAL_CUT = "chosen and rejected are the same up to max_len"
OTHER_PROMPT = "chosen and rejected follow different prompts"

_FEATURES = Features(
    {
        "chosen_ids": SequenceFeature(Value("int32")),
        "chosen_mask": SequenceFeature(Value("bool")),
        "rejected_ids": SequenceFeature(Value("int32")),
        "rejected_mask": SequenceFeature(Value("bool")),
        "chosen_length": Value("int64"),
        "rejected_length": Value("int64"),
        "margin": Value("float64"),
        "dropped": Value("string"),
    }
)


@dataclass(frozen=True)
class PreferenceFormat:
    """How a row becomes two texts; see the flags of the same names.

    Attributes:
        scored: True for reward models: the score is read at the end token, which each half keeps when it is cut.
            False for DPO: log-probs are summed over the answer, and the prompt has to be told from it.
        margin: read the column ``margin``.
    """

    prompt_key: str | None
    chosen_key: str
    rejected_key: str
    input_template: str | None
    apply_chat_template: bool
    max_len: int
    scored: bool
    margin: bool

    @classmethod
    def from_config(cls, cfg: RMConfig | DPOConfig) -> PreferenceFormat:
        """As the flags of train_rm or train_dpo say."""
        shared = {name: getattr(cfg, name) for name in cls.__dataclass_fields__ if name not in ("scored", "margin")}
        scored = isinstance(cfg, RMConfig)
        return cls(**shared, scored=scored, margin=isinstance(cfg, RMConfig) and cfg.margin_loss)


@dataclass(frozen=True)
class TokenizedPair:
    """One row: ids of both halves, and which tokens belong to the answer (its end token included).

    ``dropped`` is the reason why the row can't be trained on, or empty.
    """

    chosen_ids: list[int]
    chosen_mask: list[bool]
    rejected_ids: list[int]
    rejected_mask: list[bool]
    margin: float = 0.0
    dropped: str = ""


class PreferenceDataset:
    """Usable pairs in the order of the source. Half ``2 i`` is the chosen answer of pair ``i``, ``2 i + 1`` the other.

    Attributes:
        lengths: int64 ``[2 * pairs]``, tokens of each half.
        margins: float64 ``[pairs]``, by how much the chosen answer is better; 0 where the data doesn't say.
        dropped: number of unusable rows by reason.
    """

    def __init__(self, table: Dataset, dropped: dict[str, int]) -> None:
        self.dropped = dropped
        self._table = table
        columns = ["chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"]
        self._rows = table.with_format("numpy", columns=columns)
        halves = [number_column(table, f"{half}_length") for half in ("chosen", "rejected")]
        self.lengths = np.stack(halves, axis=1).flatten()
        self.margins = number_column(table, "margin")

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self._rows)

    def fetch(self, halves: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids int32 ``[T]`` and answer mask bool ``[T]`` of some halves; the first token is in no mask."""
        found: dict[int, Any] = {}
        result = []
        for half in halves:
            pair, which = divmod(int(half), 2)
            if pair not in found:
                found[pair] = self._rows[pair]
            name = "rejected" if which else "chosen"
            result.append((found[pair][f"{name}_ids"].astype(np.int32), found[pair][f"{name}_mask"]))
        return result

    def first(self, count: int) -> PreferenceDataset:
        """The first pairs, as a data set of its own."""
        return PreferenceDataset(self._table.select(range(min(count, len(self)))), {})


def build_preference_dataset(
    rows: Dataset, cfg: RMConfig | DPOConfig, tokenizer: PreTrainedTokenizerBase, source: str = "the data"
) -> PreferenceDataset:
    """Turn all rows into pairs of ids.

    Rows without anything to learn from (an empty answer, twice the same answer, for DPO a prompt as long as
    ``max_len``) are dropped and counted.

    Raises:
        DataError: a column is missing, or a row is null or malformed (its number is named), or nothing is left.
    """
    style = PreferenceFormat.from_config(cfg)
    check_preference_columns(rows, style, source)
    if style.apply_chat_template:
        warn_of_tools(rows, tokenizer.chat_template, source)
    table, dropped = tokenize_rows(
        rows,
        lambda row, where: _columns(tokenize_pair(row, where, style, tokenizer)),
        _FEATURES,
        style=style,
        tokenizer=tokenizer,
        num_proc=cfg.dataloader_num_workers,
        source=source,
    )
    return PreferenceDataset(table, dropped)


def _columns(pair: TokenizedPair) -> dict[str, Any]:
    return {**vars(pair), "chosen_length": len(pair.chosen_ids), "rejected_length": len(pair.rejected_ids)}


def check_preference_columns(rows: Dataset, style: PreferenceFormat, source: str) -> None:
    """Raise a DataError when a column that the flags name is missing."""
    keys = {"prompt_key": style.prompt_key, "chosen_key": style.chosen_key, "rejected_key": style.rejected_key}
    require_columns(rows, keys, source)
    if style.margin and MARGIN not in rows.column_names:
        raise DataError(
            f"--margin_loss needs a column {MARGIN!r}, which {source} doesn't have; its columns are: "
            f"{', '.join(rows.column_names)}"
        )


def tokenize_pair(
    row: dict[str, Any], where: str, style: PreferenceFormat, tokenizer: PreTrainedTokenizerBase
) -> TokenizedPair:
    """One row as ids and masks of both halves.

    Args:
        where: the row, for messages.

    Raises:
        DataError: the row is null or malformed.
    """
    texts.require_values(row, (style.prompt_key, style.chosen_key, style.rejected_key), where)
    margin = _margin(row, where) if style.margin else 0.0
    # the length limit comes last: it must not decide which reason is told
    chosen, rejected = (
        _half(row, column, style, tokenizer, where) for column in (style.chosen_key, style.rejected_key)
    )
    for column, half in ((style.chosen_key, chosen), (style.rejected_key, rejected)):
        if half.dropped:
            return _unusable(f"{half.dropped} ({column})" if half.dropped == EMPTY_RESPONSE else half.dropped)
    if chosen.token_ids == rejected.token_ids:
        return _unusable(IDENTICAL)
    if style.apply_chat_template and style.prompt_key is None and not style.scored:
        if chosen.prompt != rejected.prompt:
            return _unusable(OTHER_PROMPT)
    chosen, rejected = (_cut(half, style, tokenizer) for half in (chosen, rejected))
    if not (any(chosen.loss_mask) and any(rejected.loss_mask)):
        return _unusable(TOO_LONG)
    if chosen.token_ids == rejected.token_ids:
        return _unusable(IDENTICAL_CUT)
    return TokenizedPair(chosen.token_ids, chosen.loss_mask, rejected.token_ids, rejected.loss_mask, margin)


def _unusable(reason: str) -> TokenizedPair:
    return TokenizedPair([], [], [], [], dropped=reason)


def _margin(row: dict[str, Any], where: str) -> float:
    value = row[MARGIN]
    if value in (None, ""):  # a source without margins beside one that has them
        return 0.0
    try:  # a cell of a CSV file is a text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: column {MARGIN!r} is {value!r}, not a number")
    return number


def _cut(half: Tokenized, style: PreferenceFormat, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A half within the length limit; a reward model's with its end token."""
    if style.scored:
        ids, _ = texts.end_scored(tokenizer, half.token_ids, style.max_len)
        return Tokenized(ids, [False] + [True] * (len(ids) - 1))
    return Tokenized(half.token_ids[: style.max_len], half.loss_mask[: style.max_len])


def _half(
    row: dict[str, Any], column: str, style: PreferenceFormat, tokenizer: PreTrainedTokenizerBase, where: str
) -> Tokenized:
    """One half without a length limit (reward models: without the end token)."""
    if style.apply_chat_template:
        return _chat_half(row, column, style, tokenizer, where)
    answer = texts.plain_text(row[column], where, column).rstrip("\n")
    if not answer:
        return Tokenized([], [], EMPTY_RESPONSE)
    if style.scored or style.prompt_key is None:
        prompt = "" if style.prompt_key is None else texts.plain_text(row[style.prompt_key], where, style.prompt_key)
        head = texts.apply_template(style.input_template, prompt) if style.prompt_key is not None else ""
        return _whole(head + answer, style, tokenizer)
    layout = SFTFormat(style.prompt_key, column, style.input_template, apply_chat_template=False, max_len=1 << 40)
    return tokenize_sft_row(row, where, layout, tokenizer)


def _whole(text: str, style: PreferenceFormat, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A text with one end token (reward models: none yet), all of it answer but for the first token."""
    ids = texts.encode_scored(tokenizer, text)
    if not style.scored:
        ids = [*ids, tokenizer.eos_token_id]
    return Tokenized(ids, [False] + [True] * (len(ids) - 1))


def _chat_half(
    row: dict[str, Any], column: str, style: PreferenceFormat, tokenizer: PreTrainedTokenizerBase, where: str
) -> Tokenized:
    messages = texts.as_messages(row[column], "assistant", where)
    if style.prompt_key is None:
        if isinstance(row[column], str):
            raise DataError(
                f"{where}: column {column!r} is a text; without --prompt_key it should be the whole conversation, a "
                "list of messages. Name the prompt's column with --prompt_key, or leave out --apply_chat_template"
            )
        prompt, answer = messages[:-1], messages[-1:]
    else:
        prompt, answer = texts.as_messages(row[style.prompt_key], "user", where), messages
        if len(answer) > len(prompt) > 0 and answer[: len(prompt)] == prompt:
            raise DataError(
                f"{where}: column {column!r} begins with the prompt of column {style.prompt_key!r}, which would come "
                "twice; leave out --prompt_key"
            )
    if not answer or (len(answer) == 1 and not (answer[0]["content"] or answer[0].get("tool_calls"))):
        return Tokenized([], [], EMPTY_RESPONSE)
    if not prompt:
        return Tokenized([], [], EMPTY_PROMPT)
    if answer[-1]["role"] != "assistant":
        raise DataError(f"{where}: column {column!r} ends with a message from {answer[-1]['role']!r}, not assistant")
    if style.scored:
        return _whole(texts.render(tokenizer, prompt + answer, False, where), style, tokenizer)
    turns = [len(prompt) + i for i, message in enumerate(answer) if message["role"] == "assistant"]
    ids, mask = texts.encode_turns(tokenizer, prompt + answer, turns, where)
    return Tokenized(ids, [False, *mask[1:]])
