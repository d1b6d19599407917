"""Read JSON and CSV as they are written: texts stay texts, whatever they look like. Files without rows are none."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas
import pyarrow
import pyarrow.json
from datasets import Dataset, DatasetBuilder, DatasetDict, load_dataset_builder
from datasets import config as datasets_config
from datasets.packaged_modules.csv import csv as csv_module
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json import json as json_module
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet

from openrlhf.config.datasource import FILE_SUFFIXES
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

# Fields of a builder's configuration that say which data it reads, not how.
_WHICH = {"name", "version", "data_dir", "data_files", "description", "features"}


def read_as_written(name: str, **which: Any) -> DatasetDict:
    """As `datasets.load_dataset`, but texts of JSON files don't become dates, and all cells of CSV files are texts.

    A split, or a file of several, may have no rows.

    Args:
        name: a folder, a hub id, or the name of a format.
        which: ``data_files`` or ``data_dir``.
    """
    builder = load_dataset_builder(name, **which)
    _tell_unread(Path(name, which.get("data_dir") or ""), builder)
    for own, kind in ((_TextJson, Json), (_TextCsv, Csv)):
        if isinstance(builder, kind):
            how = {f.name: getattr(builder.config, f.name) for f in dataclasses.fields(builder.config)}
            builder = own(
                dataset_name=builder.dataset_name,
                config_name=builder.config.name,
                hash=f"{builder.hash}-as-written",  # the library's own readers cache other types for the same file
                base_path=builder.base_path,
                repo_id=builder.repo_id,
                data_files=builder.config.data_files,
                **{field: value for field, value in how.items() if field not in _WHICH},
            )
            break
    if isinstance(builder, Parquet) and builder.config.batch_size is None:
        # By itself it takes the size of a file's first part, which is 0 in a file without rows.
        builder.config.batch_size = datasets_config.DEFAULT_MAX_BATCH_SIZE
    builder.download_and_prepare()
    return DatasetDict({str(split): _rows_of(builder, str(split)) for split in builder.info.splits or ()})


def _tell_unread(folder: Path, builder: DatasetBuilder) -> None:
    """Warn of data files in a folder that are left out: the library reads one format, and looks for names of splits."""
    if not folder.is_dir():
        return
    read = {Path(file).resolve() for files in (builder.config.data_files or {}).values() for file in files}
    left = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.suffix in FILE_SUFFIXES and file.resolve() not in read and not _about_data(file.relative_to(folder))
    ]
    if left:
        logger.warning(
            "%s: %d of its data files are not read: %s. A folder's files have one format and, if one is named after a "
            "split (train, test, ...), all are; name the others as sources of their own",
            folder,
            len(left),
            ", ".join(left[:5]) + (", ..." if len(left) > 5 else ""),
        )


def _about_data(file: Path) -> bool:
    """Whether a file is hidden, or known to describe a data set."""
    return any(part.startswith((".", "__")) for part in file.parts) or file.name.startswith("dataset_info")


def _rows_of(builder: DatasetBuilder, split: str) -> Dataset:
    assert builder.info.splits is not None
    if builder.info.splits[split].num_examples == 0:  # which the library refuses to open
        columns = builder.info.features or {}
        return Dataset.from_dict({column: [] for column in columns}, features=builder.info.features)
    rows = builder.as_dataset(split)
    assert isinstance(rows, Dataset)
    return rows


class _TextJson(Json):
    def _generate_tables(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        arrow = SimpleNamespace(read_json=_read_json, ReadOptions=pyarrow.json.ReadOptions)
        whole = functools.partial(json_module.pandas_read_json, dtype=False)
        with mock.patch.multiple(json_module, paj=arrow, pandas_read_json=whole):
            yield from super()._generate_tables(*args, **kwargs)


class _TextCsv(Csv):
    def _generate_tables(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with mock.patch.object(csv_module, "pd", SimpleNamespace(read_csv=_read_csv)):
            yield from super()._generate_tables(*args, **kwargs)

    def _cast_table(self, table: pyarrow.Table) -> pyarrow.Table:
        if any(name.startswith("__index_level_") for name in table.column_names):  # pandas' name for them
            raise ValueError("its rows have more cells than the first line has names; quote cells that have a comma")
        return table.cast(pyarrow.schema([(name, pyarrow.string()) for name in table.column_names]))


def _read_csv(file: Any, **how: Any) -> Any:
    return pandas.read_csv(file, **{**how, "dtype": str, "na_filter": False})


def _read_json(file: Any, read_options: Any) -> pyarrow.Table:
    """Arrow takes texts for times if all of a column look like one; only a schema says that they aren't.

    Nor does it look whether texts are UTF-8, which only those notice who read them.
    """
    table = pyarrow.json.read_json(file, read_options)
    table.validate(full=True)
    schema = pyarrow.schema([field.with_type(_texts_for_times(field.type)) for field in table.schema])
    if schema == table.schema:
        return table
    file.seek(0)
    return pyarrow.json.read_json(file, read_options, pyarrow.json.ParseOptions(explicit_schema=schema))


def _texts_for_times(kind: pyarrow.DataType) -> pyarrow.DataType:
    if pyarrow.types.is_timestamp(kind):
        return pyarrow.string()
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([field.with_type(_texts_for_times(field.type)) for field in kind])
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_texts_for_times(kind.value_type)))
    return kind
