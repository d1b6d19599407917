"""The trainings of preference_cases.py, run once for all the tests that judge them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

SCRIPT = Path(__file__).parent / "preference_cases.py"
DEADLINE_S = 600

for folder in (Path(__file__).parent, *(Path(__file__).parents[1] / name for name in ("models", "rollout"))):
    sys.path.insert(0, str(folder))


class PreferenceRuns:
    """What the runs left behind: metrics by ``<command>/<name>``, and folders."""

    def __init__(self, folder: Path, results: dict[str, Any]) -> None:
        self.folder = folder
        self._results = results

    def lines(self, run: str, kind: str = "train") -> list[dict[str, Any]]:
        return [line for line in self._results[run] if line["kind"] == kind]

    def values(self, run: str, metric: str, kind: str = "train") -> list[float]:
        return [line[metric] for line in self.lines(run, kind)]

    def statuses(self, command: str) -> list[int]:
        """Exit statuses of the command of the docs, and of the same with a column that isn't there."""
        return self._results[f"docs/{command}"]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, all that judge these trainings are in the process that runs them."""
    for item in items:
        if "preference_runs" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("preference_runs"))


@pytest.fixture(scope="session")
def preference_runs(tmp_path_factory: pytest.TempPathFactory) -> PreferenceRuns:
    folder = tmp_path_factory.mktemp("preference")
    results: dict[str, Any] = {}
    for ranks in (1, 2):
        run_ranks(SCRIPT, ranks, folder, DEADLINE_S, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf"))
        results |= json.loads((folder / f"results_{ranks}.json").read_text())
    return PreferenceRuns(folder, results)
