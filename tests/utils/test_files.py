"""Folders that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.utils.files import folder_bytes, publish_folder, temporary_folder, write_atomic


def make(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_new_and_empty_targets(tmp_path: Path) -> None:
    for target in (tmp_path / "new", make(tmp_path / "empty")):
        with temporary_folder(target) as scratch:
            assert scratch.parent == target.parent
            (scratch / "config.json").write_text("{}")
            publish_folder(scratch, target)
        assert (target / "config.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "new"]


def test_other_content_stays_and_old_model_files_go(tmp_path: Path) -> None:
    target = make(tmp_path / "t", notes__txt="mine", model__safetensors="old", pytorch_model__bin="old")
    make(target / "sub", latest="x")
    source = make(tmp_path / "s", config__json="{}", a__safetensors="new")
    publish_folder(source, target)
    assert sorted(p.name for p in target.iterdir()) == ["a.safetensors", "config.json", "notes.txt", "sub"]
    assert (target / "sub" / "latest").read_text() == "x"


def test_target_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        publish_folder(make(tmp_path / "s", a="b"), tmp_path / "t")


def test_scratch_is_removed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), temporary_folder(tmp_path / "t") as scratch:
        (scratch / "x").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_small_files_and_sizes(tmp_path: Path) -> None:
    write_atomic(tmp_path / "latest", "one")
    write_atomic(tmp_path / "latest", "two!")
    assert (tmp_path / "latest").read_text() == "two!"
    make(tmp_path / "sub", a="12345")
    assert folder_bytes(tmp_path) == 9
