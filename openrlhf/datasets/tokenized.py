"""Turn all rows of a source into ids once, drop what can't be trained on, and say what was dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features
from datasets import config as datasets_config
from transformers import PreTrainedTokenizerBase

from openrlhf.datasets.sources import DataError
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

# Part of the name of cached ids: raise it with every change of the ids, masks or reasons that the code (text, sft,
# preference, unpaired) makes of a row, or ids of the old code would be trained on.
FORMAT = 5

DROPPED = "dropped"
# Below this many rows the result stays in memory; above, on disk, where all ranks share it.
_IN_MEMORY_ROWS = 20_000


def tokenize_rows(
    rows: Dataset,
    tokenize: Callable[[dict[str, Any], str], dict[str, Any]],
    features: Features,
    *,
    style: Any,
    tokenizer: PreTrainedTokenizerBase,
    num_proc: int,
    source: str,
) -> tuple[Dataset, dict[str, int]]:
    """The usable rows as ids.

    Args:
        tokenize: a row and its place, for messages, to the columns of ``features``; the column ``dropped`` is the
            reason why the row can't be used, or empty.
        style: everything beside rows and tokenizer that the result depends on; its ``repr`` names a cached result.
        num_proc: further processes that work; 0 = none.

    Returns:
        The rows whose ``dropped`` is empty, in their order, and the number of other rows by reason.

    Raises:
        DataError: nothing is left, or what ``tokenize`` raises.
    """
    fingerprint = _fingerprint(rows, style, tokenizer)
    in_memory = len(rows) <= _IN_MEMORY_ROWS
    # By itself the library writes beside the data, which may be a folder that is only read.
    cache = Path(datasets_config.HF_DATASETS_CACHE) / "openrlhf_tokens" / f"{fingerprint}.arrow"
    table = rows.map(
        lambda row, index: tokenize(row, f"{source}, row {index}"),
        with_indices=True,
        remove_columns=rows.column_names,
        features=features,
        num_proc=num_proc or None,
        keep_in_memory=in_memory,
        cache_file_name=None if in_memory else str(cache),
        new_fingerprint=fingerprint,
    )
    reasons = table.data.column(DROPPED)
    counts = {entry["values"]: entry["counts"] for entry in pc.value_counts(reasons).to_pylist()}
    dropped = {reason: count for reason, count in counts.items() if reason}
    if len(rows) == sum(dropped.values()):
        raise DataError(f"{source}: none of the {len(rows)} rows can be trained on: {counted(dropped)}")
    if dropped:
        logger.warning("%s: %d of %d rows are left out: %s", source, sum(dropped.values()), len(rows), counted(dropped))
        table = table.select(np.flatnonzero(pc.equal(reasons, "").to_numpy()))
    return table, dropped


def counted(dropped: Mapping[str, int]) -> str:
    """Reasons and how often each held, for messages."""
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(dropped.items()))


def number_column(table: Dataset, name: str) -> np.ndarray:
    """A column of numbers as an array, without the other columns."""
    return table.select_columns([name]).with_format("arrow")[:].column(name).to_numpy()


def _fingerprint(rows: Dataset, style: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    setup = (FORMAT, style, tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.truncation_side)
    parts = [rows._fingerprint, backend, *map(repr, setup)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
