"""docs/metrics.md has a row for every metric of train_ppo_ray; whole runs are held to it in tests/e2e."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from documented_metrics import documented, matches, undocumented

ROOT = Path(__file__).resolve().parents[2]
PREFIX = re.compile(r"(rollout|reward|reward_part|timing|memory|sync)/[^ ]+")
SOURCES = ("algorithms", "engines", "rollout", "trainer", "workers")


def named_in_code() -> set[str]:
    """Texts of the code that look like a metric with a prefix; `<x>` is what an f-string puts in."""
    found = set()
    for path in (file for name in SOURCES for file in (ROOT / "openrlhf" / name).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inner = {part for node in joined for part in node.values}
        found |= {"".join(p.value if isinstance(p, ast.Constant) else "<x>" for p in node.values) for node in joined}
        constants = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n not in inner)
        found |= {node.value for node in constants if isinstance(node.value, str)}
    return {text for text in found if PREFIX.fullmatch(text)}


def test_a_name_that_no_row_has_is_found() -> None:
    names = ["rollout/num_samples", "rollout/lost_agent", "eval_gsm_pass8", "rollout/nothing", "sync/x", "kl"]
    assert undocumented(names) == {"rollout/nothing", "sync/x"}


def test_every_name_with_a_prefix_has_a_row() -> None:
    names = named_in_code()
    assert len(names) > 40 and not undocumented(names)


def test_every_row_with_a_prefix_is_in_the_code() -> None:
    rows = [row for row in documented() if PREFIX.fullmatch(row)]
    names = named_in_code()
    assert len(rows) > 40 and not [row for row in rows if not any(matches(row, name) for name in names)]
