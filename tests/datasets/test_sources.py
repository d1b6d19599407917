"""Reading sources: every format, mixing, splits, and errors that name what is there."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import write_jsonl
from datasets import Dataset, DatasetDict

from openrlhf.config import RMConfig, SFTConfig
from openrlhf.datasets.sources import DataError, load_configured_rows, load_rows, require_columns

ROWS = [{"input": f"q{i}", "output": f"a{i}"} for i in range(10)]


def values(source: str, **arguments: object) -> list[str]:
    return list(load_rows(source, **arguments)["input"])  # type: ignore[arg-type]


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_file_format(tmp_path: Path, suffix: str) -> None:
    path, table = tmp_path / f"rows.{suffix}", Dataset.from_list(ROWS)
    if suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "jsonl":
        write_jsonl(path, ROWS)
    elif suffix == "csv":
        table.to_csv(path)
    elif suffix == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    assert values(str(path)) == [row["input"] for row in ROWS]


DATED = [
    {"at": "2024-01-01", "more": {"times": ["2024-01-01T10:00:00Z", "2023-05-06 11:00"]}, "none": None, "count": 1},
    {"at": "2023-05-06", "more": {"times": []}, "none": None, "count": 2},
]


@pytest.mark.parametrize("form", ["lines", "list", "pretty", "columns", "folder"])
def test_texts_of_json_are_not_taken_for_times(tmp_path: Path, form: str) -> None:
    path = tmp_path / "data" / ("rows.jsonl" if form in ("lines", "folder") else "rows.json")
    path.parent.mkdir()
    if form in ("lines", "folder"):
        write_jsonl(path, DATED)
    elif form == "columns":
        path.write_text('{"timestamp": {"0": "2024-01-01"},\n "x": {"0": "12"}}')
    else:
        path.write_text(json.dumps(DATED) if form == "list" else "\n" + json.dumps(DATED, indent=1))
    rows = load_rows(str(path.parent if form == "folder" else path))
    if form == "columns":
        assert json.dumps(rows[:]).count('"2024-01-01"') == 1 and json.dumps(rows[:]).count('"12"') == 1
    else:
        assert rows.to_list() == DATED


def test_times_in_later_parts_of_a_json_file_stay_texts(tmp_path: Path) -> None:
    """The reader takes 10 MB at a time: what looks like times in one part need not in the next."""
    rows = [{"at": "2024-01-01", "pad": "x" * 6_000_000}] * 2 + [{"at": "no date", "pad": ""}]
    assert list(load_rows(write_jsonl(tmp_path / "rows.jsonl", rows))["at"]) == ["2024-01-01", "2024-01-01", "no date"]


def test_cells_of_csv_and_tsv_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('input,output\n2,N/A\n007,"a, b"\nnull,None\n2024-01-01,\n1e3\n')
    assert load_rows(str(tmp_path / "rows.csv")).to_list() == [
        {"input": "2", "output": "N/A"},
        {"input": "007", "output": "a, b"},
        {"input": "null", "output": "None"},
        {"input": "2024-01-01", "output": ""},
        {"input": "1e3", "output": ""},
    ]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rows.tsv").write_text("input\toutput\n1.50\tNA\n")
    assert load_rows(str(tmp_path / "folder")).to_list() == [{"input": "1.50", "output": "NA"}]
    (tmp_path / "comma.csv").write_text("input,output\nq,a,b\n")
    with pytest.raises(DataError, match="more cells than the first line has names"):
        load_rows(str(tmp_path / "comma.csv"))


def test_folders(tmp_path: Path) -> None:
    table = Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "single")
    DatasetDict({"train": table.select(range(6)), "test": table.select(range(6, 10))}).save_to_disk(tmp_path / "split")
    files = tmp_path / "files" / "inner"
    files.mkdir(parents=True)
    write_jsonl(files / "train.jsonl", ROWS[:3])
    write_jsonl(files / "test.jsonl", ROWS[3:5])
    assert len(values(str(tmp_path / "single"))) == 10
    assert values(str(tmp_path / "split"), split="test") == ["q6", "q7", "q8", "q9"]
    assert values(str(files)) == ["q0", "q1", "q2"]
    assert values(f"{tmp_path / 'files'} @ inner", split="test") == ["q3", "q4"]


@pytest.mark.parametrize("name", ["rows[1].jsonl", "rows?.jsonl", "[a]/rows.jsonl"])
def test_a_path_is_that_of_one_file(tmp_path: Path, name: str) -> None:
    """The library takes paths for patterns: of rows[1].jsonl it read rows1.jsonl."""
    for folder in ("a", "[a]"):
        (tmp_path / folder).mkdir()
    write_jsonl(tmp_path / "rows1.jsonl", ROWS)
    write_jsonl(tmp_path / "a" / "rows.jsonl", ROWS)
    assert values(write_jsonl(tmp_path / name, ROWS[3:5])) == ["q3", "q4"]


def test_folder_with_the_name_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "data.parquet"
    folder.mkdir()
    Dataset.from_list(ROWS).to_parquet(folder / "part-00000.snappy.parquet")
    (folder / "_SUCCESS").touch()
    assert len(values(str(folder))) == 10


def test_sources_follow_each_other_and_missing_columns_are_null(tmp_path: Path, jsonl: str) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", [{"input": "x", "extra": "y"}])
    rows = load_rows(f"{jsonl} , {other}")
    assert rows["input"][-1] == "x" and rows["output"][-1] is None and rows["extra"][0] is None


def test_a_named_source_names_its_rows(tmp_path: Path, jsonl: str) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", [{"input": "x", "datasource": "own"}, {"input": "y", "datasource": None}])
    rows = load_rows(f"first = {jsonl}, {other}, third={other}", max_samples=2)
    assert list(zip(rows["input"], rows["datasource"], strict=True)) == [("q0", "first"), ("q1", "first")]
    rows = load_rows(f"first = {jsonl}, {other}, third={other}")
    assert list(rows["datasource"]) == ["first"] * 10 + ["own", None, "third", "third"]
    assert rows["input"][10:] == ["x", "y", "x", "y"]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", list(range(10))),
        ("train[:30%]", [0, 1, 2]),
        ("train[80%:]", [8, 9]),
        ("train[2:4]", [2, 3]),
        ("train[-2:]", [8, 9]),
        ("train[:100]", list(range(10))),
        ("train[-%:]", list(range(10))),
    ],
)
def test_splits(jsonl: str, split: str, expected: list[int]) -> None:
    assert values(jsonl, split=split) == [f"q{i}" for i in expected]


def test_max_samples_cuts_each_source_and_the_whole(
    tmp_path: Path, jsonl: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", [{"input": f"b{i}", "output": ""} for i in range(10)])
    assert values(f"{jsonl},{other}", max_samples=3) == ["q0", "q1", "q2"]
    told = [
        f"{name}: the first 3 of {count} rows are used (--max_samples)" for name, count in ((jsonl, 10), (other, 10))
    ]
    assert caplog.messages == [*told, f"{jsonl},{other}: the first 3 of 6 rows are used (--max_samples)"]
    assert values(jsonl, max_samples=100) == [row["input"] for row in ROWS] and len(caplog.messages) == 3


def test_mixing_repeats_the_smaller_source_until_all_are_used_up(tmp_path: Path, jsonl: str) -> None:
    """FLAGS (f): 10 + 4 rows at .5/.5 give 26 rows with seed 42."""
    small = write_jsonl(tmp_path / "b.jsonl", [{"input": f"b{i}", "output": ""} for i in range(4)])
    mixed = values(f"{jsonl},{small}", probabilities="0.5,0.5", seed=42)
    assert len(mixed) == 26
    assert {f"q{i}" for i in range(10)} <= set(mixed) and {f"b{i}" for i in range(4)} <= set(mixed)
    assert mixed == values(f"{jsonl},{small}", probabilities="0.5,0.5", seed=42)
    thirds = values(f"{jsonl},{small},{small}", probabilities="0.3333333,0.3333333,0.3333333", seed=42)
    assert set(thirds) == set(mixed)


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [("0.5", "1 numbers for 2"), ("0.5,0.6", "sum to 1"), ("1,0", "above 0"), ("a,b", "no list of numbers")],
)
def test_bad_probabilities(jsonl: str, probabilities: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(f"{jsonl},{jsonl}", probabilities=probabilities)


def test_missing_file_lists_its_neighbours(tmp_path: Path, jsonl: str) -> None:
    with pytest.raises(DataError, match=r"no file \S*wrong.jsonl.*has: rows.jsonl"):
        load_rows(str(tmp_path / "wrong.jsonl"))
    with pytest.raises(DataError, match="there is no folder"):
        load_rows(str(tmp_path / "no" / "file.jsonl"))


def test_other_file_types_are_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(DataError, match=r"\.json, \.jsonl, \.csv, \.parquet, \.arrow"):
        load_rows(str(tmp_path / "rows.txt"))
    (tmp_path / "load.py").write_text("")
    with pytest.raises(DataError, match="loading script"):
        load_rows(str(tmp_path / "load.py"))


def test_empty_and_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="empty file"):
        load_rows(str(tmp_path / "empty.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"input": "a"}\n{broken\n')
    with pytest.raises(DataError, match=r"cannot read .*bad.jsonl' as json: line 2, column 2: Expecting property name"):
        load_rows(str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.json").write_text('[{"input": "a"},\n {"input": "b"},\n {"input" "c"}]')
    with pytest.raises(DataError, match=r"cannot read .*bad.json' as json: line 3, column 11: Expecting ':' delimiter"):
        load_rows(str(tmp_path / "bad.json"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="cannot read the folder.*nothing"):
        load_rows(str(tmp_path / "folder"))


def test_json_in_another_encoding_names_the_line(tmp_path: Path) -> None:
    """The reader takes any bytes for texts, and what reads them ended in an error of its own."""
    lines, rows = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text('{"input": "a"}\n{"input": "é"}\n', encoding="latin1")
    rows.write_text('[{"input": "a"},\n {"input": "aé"}]', encoding="latin1")
    for path, place in ((lines, "line 2, column 12"), (rows, "line 2, column 14")):
        with pytest.raises(DataError, match=f"cannot read .* as json: {place}: not UTF-8"):
            load_rows(str(path))


def test_files_without_rows(tmp_path: Path) -> None:
    """As Spark and others write them: beside other parts they are nothing, alone they are told."""
    some = Dataset.from_list(ROWS)
    none = Dataset.from_dict({"input": [], "output": []}, features=some.features)
    none.to_parquet(tmp_path / "none.parquet")
    (tmp_path / "none.csv").write_text("input,output\n")
    for path in (tmp_path / "none.parquet", tmp_path / "none.csv"):
        with pytest.raises(DataError, match="has no rows"):
            load_rows(str(path))
    parts, splits = tmp_path / "parts", tmp_path / "splits"
    parts.mkdir()
    none.to_parquet(parts / "part-0.parquet")
    some.to_parquet(parts / "part-1.parquet")
    assert len(values(str(parts))) == 10
    splits.mkdir()
    (splits / "train.csv").write_text("input\nq\n")
    (splits / "test.csv").write_text("input\n")
    assert values(str(splits)) == ["q"]
    with pytest.raises(DataError, match="no rows"):
        load_rows(str(splits), split="test")


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library takes the format that most files have, and of train.jsonl and more.jsonl the first alone."""
    formats, names = tmp_path / "formats", tmp_path / "names"
    for folder in (formats, names):
        folder.mkdir()
    for name in (formats / "a.jsonl", formats / "b.jsonl", names / "train.jsonl", names / "more.jsonl"):
        write_jsonl(name, ROWS[:2])
    with caplog.at_level(logging.WARNING):
        load_rows(str(formats))
        assert not caplog.messages
        Dataset.from_list(ROWS).to_parquet(formats / "c.parquet")
        (formats / ".cache").mkdir()
        (formats / ".cache" / "old.csv").write_text("input")
        for folder, count, left in ((formats, 4, "c.parquet"), (names, 2, "more.jsonl")):
            assert len(load_rows(str(folder))) == count
            assert f"{folder}: 1 of its data files are not read: {left}. A folder" in caplog.messages[-1]


def test_files_of_a_folder_that_have_other_columns_are_told(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"input": "x"}])
    write_jsonl(tmp_path / "b.jsonl", [{"input": "x", "more": 1}])
    with pytest.raises(DataError, match=r"at some point there are 1 new columns \({'more'}\)\); it has: a.jsonl, b"):
        load_rows(str(tmp_path))


def test_unknown_split_lists_the_splits(jsonl: str) -> None:
    with pytest.raises(DataError, match="no split 'test'; it has: train"):
        load_rows(jsonl, split="test")
    with pytest.raises(DataError, match="slice"):
        load_rows(jsonl, split="train[:5")
    with pytest.raises(DataError, match="no rows"):
        load_rows(jsonl, split="train[5:5]")


def test_sources_that_do_not_fit_together(tmp_path: Path, jsonl: str) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", [{"input": {"nested": 1}, "output": "x"}])
    words = (
        r"column 'input' is in \S*rows.jsonl Value\('string'\); in \S*b.jsonl {'nested': Value\('int64'\)}. Give it one"
    )
    with pytest.raises(DataError, match=words):
        load_rows(f"{jsonl},{other}")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_of_any_width_fit_together(tmp_path: Path, jsonl: str, kind: pa.DataType) -> None:
    """pandas writes large strings into Parquet files, and Polars large lists of them."""
    message = pa.struct([("role", kind), ("content", kind)])
    chats = [[{"role": "user", "content": "hi"}]]
    columns = {
        "input": pa.array(["x"], kind),
        "output": pa.array(["y"], kind),
        "chat": pa.array(chats, pa.large_list(message)),
        "count": pa.array([1], pa.int32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    other = write_jsonl(tmp_path / "b.jsonl", [{"chat": chats[0], "count": 2}])
    rows = load_rows(f"{tmp_path / 'a.parquet'}, {jsonl}, {other}")
    assert rows["input"][:2] == ["x", "q0"] and rows["output"][0] == "y"
    assert rows["chat"][0] == rows["chat"][-1] == chats[0]
    assert rows["count"][0] == 1 and rows["count"][-1] == 2


def test_large_lists_of_messages_are_found_under_another_name(tmp_path: Path) -> None:
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    chats = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]]
    pq.write_table(pa.table({"talk": pa.array(chats, pa.large_list(message))}), tmp_path / "a.parquet")
    other = write_jsonl(tmp_path / "b.jsonl", [{"messages": chats[0]}])
    cfg = SFTConfig(dataset=f"{other},{tmp_path / 'a.parquet'}", input_key="messages")
    assert list(load_configured_rows(cfg)["messages"]) == [chats[0], chats[0]]


def test_columns_that_differ_and_are_not_needed_are_left_out(tmp_path: Path) -> None:
    """Others stay, and so do all of them where none is named: prompts pass them on."""
    one = write_jsonl(tmp_path / "a.jsonl", [{"input": "a", "output": "b", "id": 1, "score": 0.5}])
    other = write_jsonl(tmp_path / "b.jsonl", [{"input": "c", "output": "d", "id": "x", "more": 2}])
    cfg = SFTConfig(dataset=f"{one},{other}", output_key="output")
    expected = [
        {"input": "a", "output": "b", "score": 0.5, "more": None},
        {"input": "c", "output": "d", "score": None, "more": 2},
    ]
    assert load_configured_rows(cfg).to_list() == expected
    cfg.dataset_probs = "0.5,0.5"
    assert {row["input"] for row in load_configured_rows(cfg).to_list()} == {"a", "c"}
    with pytest.raises(
        DataError, match=r"column 'id' is in \S*a.jsonl Value\('int64'\); in \S*b.jsonl Value\('string'\)"
    ):
        load_rows(cfg.dataset or "")
    margins = write_jsonl(tmp_path / "m.jsonl", [{"margin": 1}]), write_jsonl(tmp_path / "n.jsonl", [{"margin": "1"}])
    with pytest.raises(DataError, match="column 'margin' is"):
        load_configured_rows(RMConfig(dataset=",".join(margins), margin_loss=True))
    kept = load_configured_rows(RMConfig(dataset=",".join(margins), chosen_key="margin2")).column_names
    assert "margin" not in kept  # nothing reads it without --margin_loss


def test_hub_name_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.datasets.readers.load_dataset_builder", _unreachable)
    with pytest.raises(DataError, match="neither a file or folder here.*offline"):
        load_rows("someone/something")


def _unreachable(*args: object, **kwargs: object) -> None:
    raise ConnectionError("offline")


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert values(write_jsonl(path, ROWS[:2])) == ["q0", "q1"]
    assert values(write_jsonl(path, ROWS[:3])) == ["q0", "q1", "q2"]


def test_missing_columns_name_flag_and_columns(jsonl: str) -> None:
    rows = load_rows(jsonl)
    require_columns(rows, {"input_key": "input", "label_key": None}, jsonl)
    with pytest.raises(DataError, match="--input_key 'prompt', --label_key 'gt'; its columns are: input, output"):
        require_columns(rows, {"input_key": "prompt", "label_key": "gt"}, jsonl)
