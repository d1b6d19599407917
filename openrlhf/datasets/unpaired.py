"""Rows of one answer and whether it is good, for KTO."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from openrlhf.config import KTOConfig
from openrlhf.datasets.sft import FEATURES, SFTDataset, SFTFormat, tokenize_sft_row
from openrlhf.datasets.sources import DataError, require_columns, warn_of_tools
from openrlhf.datasets.tokenized import number_column, tokenize_rows

_FEATURES = Features({**FEATURES, "length": Value("int64"), "answer_length": Value("int64"), "label": Value("bool")})
_LABEL_TEXTS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


class UnpairedDataset(SFTDataset):
    """Usable rows in the order of the source, with labels; in the masks are the answers.

    Attributes:
        lengths: int64 ``[rows]``, tokens of each row.
        answer_lengths: int64 ``[rows]``, tokens of the answer, which are the last ones of the row.
        labels: bool ``[rows]``, True for good answers.
    """

    def __init__(self, table: Dataset, dropped: dict[str, int]) -> None:
        super().__init__(table, dropped)
        self.lengths = number_column(table, "length")
        self.answer_lengths = number_column(table, "answer_length")
        self.labels = number_column(table, "label")


def build_unpaired_dataset(
    rows: Dataset, cfg: KTOConfig, tokenizer: PreTrainedTokenizerBase, source: str = "the data"
) -> UnpairedDataset:
    """Turn all rows into ids, masks and labels.

    Raises:
        DataError: a column is missing, or a row is null or malformed (its number is named), or nothing is left.
    """
    style = SFTFormat.from_config(cfg)
    require_columns(rows, {flag: getattr(cfg, flag) for flag in ("input_key", "output_key", "label_key")}, source)
    if style.apply_chat_template:
        warn_of_tools(rows, tokenizer.chat_template, source)

    def tokenize(row: dict[str, Any], where: str) -> dict[str, Any]:
        done = tokenize_sft_row(row, where, style, tokenizer)
        label = _label(row[cfg.label_key], where, cfg.label_key)
        lengths = {"length": len(done.token_ids), "answer_length": sum(done.loss_mask)}
        return {**vars(done), **lengths, "label": label}

    table, dropped = tokenize_rows(
        rows,
        tokenize,
        _FEATURES,
        style=(style, cfg.label_key),
        tokenizer=tokenizer,
        num_proc=cfg.dataloader_num_workers,
        source=source,
    )
    return UnpairedDataset(table, dropped)


def _label(value: Any, where: str, column: str) -> bool:
    if isinstance(value, str):  # a cell of a CSV file
        value = _LABEL_TEXTS.get(value.strip().lower(), value)
    if value in (0, 1):  # True and False too
        return bool(value)
    raise DataError(
        f"{where}: column {column!r} is {value!r}; a label is 1 or true for good answers, 0 or false for bad"
    )
