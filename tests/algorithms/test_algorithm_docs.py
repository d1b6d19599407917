"""docs/algorithms.md lists what is registered, and names tests that exist; flags offer nothing unknown."""

from __future__ import annotations

import re
from pathlib import Path

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.aggregation import LOSS_AGG_MODES
from openrlhf.algorithms.correction import CORRECTION_TYPES
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_loss import POLICY_LOSSES
from openrlhf.config.flag import METADATA_KEY
from openrlhf.config.options_algorithm import AlgorithmOptions

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def first_column(title: str) -> set[str]:
    """Names in the first column of the tables of a section."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w-]+)`", section, flags=re.MULTILINE))


def test_every_algorithm_has_a_row() -> None:
    assert first_column("Advantages") == set(ADVANTAGE_ESTIMATORS.names())
    assert first_column("Policy losses") == set(POLICY_LOSSES.names())
    assert first_column("Aggregation") == set(LOSS_AGG_MODES)
    assert first_column("Correction for the rollout engine") == set(CORRECTION_TYPES)
    assert first_column("KL") == set(KL_ESTIMATORS)


def test_needs_are_documented() -> None:
    for name in ADVANTAGE_ESTIMATORS.names():
        spec = ADVANTAGE_ESTIMATORS.get(name)
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        needs, whitened = (cell.strip() for cell in row.split("|")[-3:-1])
        assert ("critic" in needs, "n > 1" in needs) == (spec.needs_critic, spec.needs_group), name
        assert whitened == ("yes" if spec.whiten else "no"), name


def test_named_tests_and_files_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(test_\w+\.py)`", PAGE):
        assert (HERE / name).is_file(), name
    for name in set(re.findall(r"`(\w+\.py)`", PAGE)):
        assert (HERE / name).is_file() or (HERE.parents[1] / "openrlhf" / "algorithms" / name).is_file(), name


def test_flags_offer_only_what_is_registered() -> None:
    fields = AlgorithmOptions.__dataclass_fields__

    def choices(flag: str) -> set[str]:
        return set(fields[flag].metadata[METADATA_KEY].choices)

    assert choices("advantage_estimator") <= set(ADVANTAGE_ESTIMATORS.names())
    assert choices("policy_loss_type") <= set(POLICY_LOSSES.names())
    assert choices("loss_agg_mode") <= set(LOSS_AGG_MODES)
    assert choices("vllm_is_correction_type") == set(CORRECTION_TYPES)
    assert choices("kl_estimator") == set(KL_ESTIMATORS)
