"""What a file of ``--custom_algorithms`` registers, held against the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.config import PPOConfig
from openrlhf.workers.custom_algorithms import AlgorithmFileError, load_custom_algorithms

FILE = """
from openrlhf.algorithms.advantages import register_advantage_estimator

for name, needs in (("free", {}), ("grouped", {"needs_group": True}), ("critical", {"needs_critic": True})):
    register_advantage_estimator(name, **needs)(lambda columns, settings: None)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file; what it registers is forgotten afterwards."""
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS._entries))
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(("name", "samples"), [("free", 1), ("grouped", 2)])
def test_what_an_estimator_needs_is_there(file: str, name: str, samples: int) -> None:
    load_custom_algorithms(PPOConfig(custom_algorithms=file, advantage_estimator=name, n_samples_per_prompt=samples))


@pytest.mark.parametrize(
    ("name", "samples", "message"),
    [
        ("grouped", 1, "grouped compares .* --n_samples_per_prompt 1 .*; use 2 or more"),
        ("critical", 2, "critical wants .* only gae trains a critic; register it without needs_critic"),
    ],
)
def test_what_it_lacks_is_told(file: str, name: str, samples: int, message: str) -> None:
    cfg = PPOConfig(custom_algorithms=file, advantage_estimator=name, n_samples_per_prompt=samples)
    with pytest.raises(AlgorithmFileError, match=message):
        load_custom_algorithms(cfg)
