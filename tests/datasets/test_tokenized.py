"""Where the ids of many rows are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_cases import letters
from datasets import Dataset
from tokenizers.normalizers import Lowercase

from openrlhf.config import SFTConfig
from openrlhf.datasets import tokenized
from openrlhf.datasets.sft import Tokenized, build_sft_dataset
from openrlhf.datasets.sources import load_rows


def test_ids_are_cached_apart_from_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may be on storage that can't be written to, and is the user's in any case."""
    monkeypatch.setattr(tokenized, "_IN_MEMORY_ROWS", 2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    Dataset.from_list([{"input": f"q{i}", "output": f"a{i}"} for i in range(3)]).save_to_disk(data)
    before = sorted(data.rglob("*"))
    cfg = SFTConfig(output_key="output", input_template="{}")
    for _ in range(2):  # the second time from the cache
        built = build_sft_dataset(load_rows(str(data)), cfg, letters(eos="<eos>"))
        assert letters().decode(built.fetch([2])[0][0]) == "q2a2<eos>"
        assert len(list((tmp_path / "cache" / "openrlhf_tokens").glob("*.arrow"))) == 1
    assert sorted(data.rglob("*")) == before
    cfg.dataloader_num_workers = 2
    cfg.input_template = "{}="
    built = build_sft_dataset(load_rows(str(data)), cfg, letters(eos="<eos>"))
    assert len(built) == 3 and sorted(data.rglob("*")) == before


def test_cached_ids_are_those_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "_IN_MEMORY_ROWS", 0)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    rows = Dataset.from_list([{"input": "Q", "output": "a"}])
    cfg = SFTConfig(output_key="output", input_template="{}")
    plain, small = letters(eos="<eos>"), letters(eos="<eos>")
    small.backend_tokenizer.normalizer = Lowercase()  # the same vocabulary, and other ids
    found = [plain.decode(build_sft_dataset(rows, cfg, each).fetch([0])[0][0]) for each in (plain, small)]
    assert found == ["Qa<eos>", "qa<eos>"]


def test_cached_ids_are_not_those_of_older_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenized, "_IN_MEMORY_ROWS", 0)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    rows = Dataset.from_list([{"input": "q", "output": "a"}])
    cfg = SFTConfig(output_key="output", input_template="{}")
    lengths = []
    for number, response in ((1, [1]), (1, [1, 2]), (2, [1, 2])):
        monkeypatch.setattr(tokenized, "FORMAT", number)
        monkeypatch.setattr(
            "openrlhf.datasets.sft.tokenize_sft_row", lambda *_, r=response: Tokenized(r, [True] * len(r))
        )
        lengths.append(len(build_sft_dataset(rows, cfg, letters()).fetch([0])[0][0]))
    assert lengths == [1, 1, 2]
