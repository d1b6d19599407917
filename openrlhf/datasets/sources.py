"""Read rows from the sources that ``--dataset`` and its like name: files, folders, hub ids, and mixtures of them."""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import (
    Dataset,
    DatasetDict,
    Json,
    LargeList,
    List,
    Value,
    concatenate_datasets,
    disable_progress_bars,
    interleave_datasets,
    load_from_disk,
)
from datasets import config as datasets_config
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError

from openrlhf.config import BatchInferenceConfig, DPOConfig, KTOConfig, PPOConfig, RMConfig, SFTConfig
from openrlhf.config.datasource import Source, check_source, parse_probabilities, parse_sources, split_parts
from openrlhf.config.problems import FlagValueError
from openrlhf.datasets.readers import read_as_written
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

_TOOLS = "tools"  # the column, by the custom of the hub, and the name in chat templates
_TOOL_ROWS = 1000  # as many are looked at for tools

_SMALL_FILE_BYTES = 16 << 20

# Types that differ in the size of their values, or of their offsets, by the one that holds the values of all.
# pandas writes large_string into Parquet files, Polars large lists too.
_WIDTHS = {
    "large_string": {"string", "large_string", "string_view"},
    "int64": {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"},
    "float64": {"float16", "float32", "float64"},
}
_LISTS = (List, LargeList)

_Configured: TypeAlias = SFTConfig | RMConfig | DPOConfig | KTOConfig | BatchInferenceConfig


class DataError(ExplainedError, ValueError):
    """Data can't be used as asked; the message names the source, and the row or column."""


def load_rows(
    sources: str,
    *,
    split: str = "train",
    probabilities: str | None = None,
    max_samples: int | None = None,
    seed: int = 42,
    use_modelscope: bool = False,
    columns: Collection[str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Dataset:
    """Rows of all sources, one after another or mixed.

    Where several sources have lists of messages under different names, or messages with different keys, each row keeps
    its own: the column gets the name that the flags say, and the keys of other sources are None.

    Args:
        sources: ``[name=]path[@data_dir], ...`` with paths of .json, .jsonl, .csv, .parquet or .arrow files, of
            folders, or hub ids. Local data is read without the network. A name becomes the column ``datasource``.
        split: name of a split, also a slice of it (``train[:5%]``, ``train[100:200]``).
        probabilities: one for each source, summing to 1: rows are drawn at random until the last source is used
            up, smaller sources repeat. None: sources follow each other.
        max_samples: first rows taken of each source, and again of the result.
        use_modelscope: take what is not local from ModelScope instead of the Hugging Face hub.
        columns: those that are needed; any other is left out where sources have it with different types. None: all.
        texts: flag to name of the columns of texts or messages, which every source has to have.

    Raises:
        DataError: a source is missing, unreadable or empty, or the sources do not fit together.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    wanted = parse_sources(sources)
    try:
        for source in wanted:
            check_source(source)
        weights = parse_probabilities(probabilities, len(wanted)) if probabilities else None
        wanted_split = split_parts(split)
    except FlagValueError as error:
        raise DataError(f"data sources {sources!r}: {error}") from error
    parts = []
    for source in wanted:
        rows = _slice(_load(source, use_modelscope), wanted_split, source.path)
        rows = _first(rows, max_samples, source.path)
        if len(rows) == 0:
            raise DataError(f"data source {source.path!r} has no rows (split {split!r})")
        if source.name is not None:
            named = rows.remove_columns([c for c in rows.column_names if c == "datasource"])
            rows = named.add_column("datasource", [source.name] * len(rows))
        parts.append(rows)
    names = [source.path for source in wanted]
    if len(parts) > 1:
        parts = [_named(part, name, parts, texts or {}) for part, name in zip(parts, names, strict=True)]
    parts = _alike(parts, names, columns)
    if len(parts) == 1:
        merged = parts[0]
    elif weights is None:
        merged = concatenate_datasets(parts)
    else:
        merged = interleave_datasets(parts, probabilities=weights, seed=seed, stopping_strategy="all_exhausted")
    return _first(merged, max_samples, sources)


def _first(rows: Dataset, count: int | None, name: str) -> Dataset:
    if count is None or len(rows) <= count:
        return rows
    logger.info("%s: the first %d of %d rows are used (--max_samples)", name, count, len(rows))
    return rows.select(range(count))


def load_configured_rows(cfg: _Configured) -> Dataset:
    """The rows that a command's flags name; see :func:`load_rows`."""
    assert cfg.dataset is not None
    return load_rows(
        cfg.dataset,
        split=cfg.dataset_split,
        probabilities=cfg.dataset_probs,
        max_samples=cfg.max_samples,
        seed=cfg.seed,
        use_modelscope=cfg.use_ms,
        columns=needed_columns(cfg),
        texts=text_columns(cfg),
    )


def check_small_file(cfg: _Configured) -> None:
    """Look for the columns that the flags name where it takes next to no time: in one small local file.

    The commands do so before they load torch and DeepSpeed, so that a slip shows at once.

    Raises:
        DataError: a column is missing, or the file can't be read.
    """
    paths = [Path(source.path) for source in parse_sources(cfg.dataset or "")]
    if len(paths) == 1 and paths[0].is_file() and paths[0].stat().st_size <= _SMALL_FILE_BYTES:
        rows = load_rows(str(cfg.dataset), split=cfg.dataset_split, columns=needed_columns(cfg))
        require_columns(rows, dict(text_columns(cfg)), str(cfg.dataset))


def text_columns(cfg: _Configured | PPOConfig) -> dict[str, str]:
    """The columns that a command reads texts or messages from, by flag."""
    flags = ["input_key", "prompt_key", "chosen_key", "rejected_key"]
    if not (getattr(cfg, "pretrain_mode", False) or getattr(cfg, "eval_task", None) == "generate_vllm"):
        flags.append("output_key")
    return {flag: column for flag in flags if (column := getattr(cfg, flag, None))}


def needed_columns(cfg: _Configured) -> set[str]:
    """The columns that a command's flags name, and ``margin`` where it is read."""
    flags = ("input_key", "output_key", "label_key", "prompt_key", "chosen_key", "rejected_key")
    margin = {"margin"} if isinstance(cfg, RMConfig) and cfg.margin_loss else set()
    return {*margin, *filter(None, (getattr(cfg, flag, None) for flag in flags))}


def _named(part: Dataset, source: str, parts: Sequence[Dataset], texts: Mapping[str, str]) -> Dataset:
    """A source whose messages have the name that they have in the others.

    Raises:
        DataError: it lacks a column that others have, and no other column is the only one with messages.
    """
    missing = {flag: c for flag, c in texts.items() if c not in part.column_names}
    missing = {flag: c for flag, c in missing.items() if any(c in other.column_names for other in parts)}
    if not missing:
        return part
    spare = [c for c in part.column_names if c not in texts.values() and _holds_messages(part, c)]
    if len(missing) == len(spare) == 1:
        (column,) = missing.values()
        logger.info("%s: the messages are those of column %r, in place of %r", source, spare[0], column)
        return part.rename_column(spare[0], column)
    told = ", ".join(f"--{flag} {column!r}" for flag, column in missing.items())
    raise DataError(
        f"{source} has no column for {told}, which other sources have; its columns are: "
        f"{', '.join(part.column_names)}. Give the columns of all sources the same names (a list of messages is found "
        "under any name if it is the only one)"
    )


def _holds_messages(rows: Dataset, column: str) -> bool:
    if not isinstance(rows.features[column], _LISTS):
        return False
    first = rows.select_columns([column])[0][column]
    keys = set(first[0]) if first and isinstance(first[0], dict) else set()
    return {"role", "content"} <= keys or {"from", "value"} <= keys


def _alike(parts: list[Dataset], names: list[str], needed: Collection[str] | None) -> list[Dataset]:
    """Parts whose columns of one name fit together; see :func:`load_rows`.

    Raises:
        DataError: a column that is needed does not.
    """
    for column in dict.fromkeys(column for part in parts for column in part.column_names):
        holders = [i for i, part in enumerate(parts) if column in part.column_names]
        try:
            concatenate_datasets([parts[i].select_columns([column]).select(range(1)) for i in holders])
        except (ValueError, TypeError) as error:
            if needed is not None and column not in needed:
                parts = [part.remove_columns([column] if column in part.column_names else []) for part in parts]
                continue
            common = functools.reduce(_with_all_keys, (parts[i].features[column] for i in holders))
            if common is None:
                types = "; ".join(f"in {names[i]} {parts[i].features[column]}" for i in holders)
                raise DataError(
                    f"the data sources can't be put together: column {column!r} is {types}. Give it one type in all of "
                    "them, or another name in one"
                ) from error
            parts = [_cast(part, column, common) if i in holders else part for i, part in enumerate(parts)]
    return parts


def _with_all_keys(one: Any, other: Any) -> Any:
    """A type for the values of both, with all keys at every depth; None where there is none.

    That is so for values that are not dicts, or lists of them, unless only the width of their type differs.
    """
    if isinstance(one, _LISTS) and isinstance(other, _LISTS):
        inner = _with_all_keys(one.feature, other.feature)
        return None if inner is None else List(inner)
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _with_all_keys(one.get(key, value), value) for key, value in other.items()}
        return Json() if None in both.values() else {**one, **both}
    if Value("null") in (one, other):
        return one if other == Value("null") else other
    if one == other:
        return one
    for width, kinds in _WIDTHS.items():
        if isinstance(one, Value) and isinstance(other, Value) and {one.dtype, other.dtype} <= kinds:
            return Value(width)
    dicts = isinstance(one, dict | Json) and isinstance(other, dict | Json)
    return Json() if dicts else None  # as the library reads a file whose rows have dicts of several kinds


def _cast(part: Dataset, column: str, feature: Any) -> Dataset:
    features = part.features.copy()
    features[column] = feature
    if features == part.features:
        return part
    digest = hashlib.sha256(f"{part._fingerprint} {features}".encode()).hexdigest()[:32]
    # By itself the library writes beside the data, which may be a folder that is only read.
    cache = Path(datasets_config.HF_DATASETS_CACHE) / "openrlhf_columns" / f"{digest}.arrow"
    cache.parent.mkdir(parents=True, exist_ok=True)
    return part.cast(features, cache_file_name=str(cache))


def require_columns(rows: Dataset, needed: dict[str, str | None], source: str) -> None:
    """Check that the columns that flags name are there.

    Args:
        needed: flag name to column name; None = not asked for.

    Raises:
        DataError: names the flags, and the columns that the data has.
    """
    missing = {
        flag: column for flag, column in needed.items() if column is not None and column not in rows.column_names
    }
    if missing:
        told = ", ".join(f"--{flag} {column!r}" for flag, column in missing.items())
        raise DataError(f"{source} has no column for {told}; its columns are: {', '.join(rows.column_names)}")


def warn_of_tools(rows: Dataset, template: object, source: str, flag: str | None = None) -> None:
    """Say that a column ``tools`` is not shown to the model, where the chat template has a place for it.

    Args:
        flag: what shows it, where something does.
    """
    if _TOOLS not in rows.column_names or _TOOLS not in str(template):
        return
    some = rows.select_columns([_TOOLS]).select(range(min(len(rows), _TOOL_ROWS)))
    if any(value not in (None, "", "[]", "null", [], {}) for value in some[_TOOLS]):
        advice = f"give --{flag} {_TOOLS}" if flag else "tools that the model should know belong into a system message"
        logger.warning("%s: the chat template is not given the column %r; %s", source, _TOOLS, advice)


def _load(source: Source, use_modelscope: bool) -> Dataset | DatasetDict:
    path = Path(source.path)
    if path.is_dir():
        return _load_folder(source, path)
    if path.is_file():
        return _load_file(source, path)
    return _load_remote(source, use_modelscope)


def _load_file(source: Source, path: Path) -> Dataset | DatasetDict:
    loader = "json" if path.suffix == ".jsonl" else path.suffix.removeprefix(".")
    if path.stat().st_size == 0:
        raise DataError(f"data source {source.path!r} is an empty file")
    try:
        return read_as_written(loader, data_files=glob.escape(str(path)))
    except (DatasetGenerationError, ValueError, OSError) as error:
        reason = (_where_json_ends(path) if loader == "json" else None) or _reason(error)
        raise DataError(f"cannot read {source.path!r} as {loader}: {reason}") from error


def _where_json_ends(path: Path) -> str | None:
    """Line and reason for which a file is neither a JSON list nor a JSON value a line; None if it is one of them."""
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        is_list = path.suffix == ".json" and file.read(1) == "["
        file.seek(0)
        for number, line in enumerate([file.read()] if is_list else file):
            try:
                if line.strip():
                    json.loads(line)
                line.encode()
            except json.JSONDecodeError as error:
                return f"line {number + error.lineno}, column {error.colno}: {error.msg}"
            except UnicodeEncodeError as error:
                before = line[: error.start]
                place = f"line {number + 1 + before.count(chr(10))}, column {error.start - before.rfind(chr(10))}"
                return f"{place}: not UTF-8; convert the file"
    return None


def _load_folder(source: Source, path: Path) -> Dataset | DatasetDict:
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    try:
        if saved and source.data_dir is None:
            return load_from_disk(str(path))
        return read_as_written(str(path), data_dir=source.data_dir)
    except (DatasetGenerationError, ValueError, OSError) as error:
        files = ", ".join(sorted(p.name for p in path.iterdir())[:20]) or "nothing"
        raise DataError(f"cannot read the folder {source.path!r} ({_reason(error)}); it has: {files}") from error


def _load_remote(source: Source, use_modelscope: bool) -> Dataset | DatasetDict:
    if use_modelscope:
        try:
            from modelscope.msdatasets import MsDataset
        except ImportError as error:
            raise DataError("--use_ms needs the Python package 'modelscope', which is not installed") from error
        namespace, _, name = source.path.partition("/")
        return MsDataset.load(name or namespace, namespace=namespace if name else None).to_hf_dataset()
    try:
        return read_as_written(source.path, data_dir=source.data_dir)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"data source {source.path!r} is neither a file or folder here, nor a data set of the Hugging Face hub "
            f"that can be reached ({_reason(error)})"
        ) from error


def _reason(error: BaseException) -> str:
    inner = error.__cause__ or error
    if isinstance(inner, CastError):  # its text lists the types of all columns
        return f"the rows don't have the same columns: at some point {inner.details()}"
    return f"{type(inner).__name__}: {' '.join(str(inner).split()):.300}"


def _slice(rows: Dataset | DatasetDict, split: re.Match[str], source: str) -> Dataset:
    name = split["name"]
    if isinstance(rows, DatasetDict):
        if name not in rows:
            raise DataError(f"{source!r} has no split {name!r}; it has: {', '.join(rows)}")
        rows = rows[name]
    if split["start"] is None:
        return rows
    start = _bound(split["start"], len(rows), 0)
    stop = _bound(split["stop"], len(rows), len(rows))
    return rows.select(range(start, max(start, stop)))


def _bound(text: str, count: int, default: int) -> int:
    if text.strip("-%") == "":
        return default
    value = round(count * int(text[:-1]) / 100) if text.endswith("%") else int(text)
    return min(max(value + count if value < 0 else value, 0), count)
