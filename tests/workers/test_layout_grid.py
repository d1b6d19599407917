"""The layout never changes the answer: padded, packed and dynamic batches on one and two ranks, ZeRO 0, 2 and 3.

On two ranks also with sequence and with tensor parallelism.

And every advantage estimator goes through the real optimizer step, with the KL penalty in each of its places.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from estimator_cases import PLACES
from layout_cases import DIVIDED, LAYOUTS, MOVED, OBJECTIVES, SPLIT, STAGES
from rank_processes import run_ranks
from sequence_cases import BATCHES, CASES

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "layout_cases.py"
DEADLINE_S = 600


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    for ranks in (1, 2):
        run_ranks(SCRIPT, ranks, folder, DEADLINE_S)
    return {ranks: json.loads((folder / f"layouts_{ranks}.json").read_text()) for ranks in (1, 2)}


def check_steps(got: list[dict[str, float]], expected: list[dict[str, float]], rel: float) -> None:
    assert len(got) == len(expected) > 1
    for mine, reference in zip(got, expected, strict=True):
        assert mine == pytest.approx(reference, rel=rel, abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "ranks"), [*itertools.product(LAYOUTS, (1, 2)), *((layout, 2) for layout in DIVIDED | SPLIT)]
)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("role", OBJECTIVES)
def test_same_loss_gradient_and_metrics(
    grids: dict[int, dict[str, Any]], role: str, layout: str, stage: int, ranks: int
) -> None:
    results = grids[ranks][role]
    entry = results[f"zero{stage} {layout}"]
    assert entry["forward"] < 2e-6
    judged = [name for name in entry if name != "forward"]
    assert len(judged) == (len(OBJECTIVES[role]) if stage == 0 else 1)
    for objective in judged:
        check_steps(entry[objective], results["reference"][objective], rel=1e-6)
    if layout in MOVED:
        moved = results[f"zero{stage} {layout} moved"]
        assert moved["count"] > 10 and moved["weights"] < 1e-5
        check_steps(moved["steps"], results["moved reference"], rel=1e-5)


@pytest.mark.parametrize(("kind", "arch"), CASES)
def test_two_ranks_share_a_row(grids: dict[int, dict[str, Any]], kind: str, arch: str) -> None:
    """Grouped and shared key heads, sliding windows, learned positions, experts; rows shorter than the ranks."""
    rows = grids[2]["divided"][kind][arch]
    assert len(rows) == len(BATCHES)
    for members, (outputs, gradient, largest) in zip(BATCHES, rows, strict=True):
        assert outputs < 1e-5 and gradient < 2e-6 * max(1.0, largest)
        assert largest > 0.01 or not members


def test_models_that_ranks_cannot_share(grids: dict[int, dict[str, Any]]) -> None:
    messages = grids[2]["divided"]["refusals"]
    assert "has 4 attention heads and 2 key-value heads" in messages["heads"]
    assert "use one of 1, 2, 4" in messages["heads"]
    assert "2 ranks don't divide into groups of --ring_attn_size 4" in messages["ranks"]
    assert "--attn_implementation auto, but the model runs sdpa" in messages["attention"]
    assert "dynamic" in messages["rotary"] and "length of the whole row" in messages["rotary"]


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_share_layers(grids: dict[int, dict[str, Any]], stage: int) -> None:
    """Norms of single heads, tied embeddings; checkpoints and exports hold whole weights."""
    split = grids[2]["split"]
    found = split["stages"][str(stage)]
    for got, expected in zip(found["steps"], split["alone"], strict=True):
        assert got == pytest.approx(expected, rel=1e-5)
    assert found["again"] == pytest.approx(found["steps"][2], rel=1e-6) and found["resumed"] < 1e-6
    assert found["saved"] == 0 and found["shapes"]
    assert split["parted"][str(stage)] == 0, "the ranks' copies of weights that are not divided are not the same"
    if stage == 3:
        assert split["partitioned while loaded"] == pytest.approx(split["alone"][0], rel=1e-5)


def test_frozen_models_and_reward_models_share_layers(grids: dict[int, dict[str, Any]]) -> None:
    split = grids[2]["split"]
    assert split["frozen"] < 1e-5 and split["scores"] < 1e-5


def test_models_whose_layers_ranks_cannot_share(grids: dict[int, dict[str, Any]]) -> None:
    messages = grids[2]["split"]["refusals"]
    assert "has 4 attention heads and 1 key-value heads" in messages["heads"]
    assert "layers of gpt2 has none" in messages["plan"] and "--zero_stage 3" in messages["plan"]
    assert "--ds_tensor_parallel_size was 4" in messages["checkpoint"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_every_estimator_trains_with_the_kl_penalty_in_each_place(
    grids: dict[int, dict[str, Any]], estimator: str, place: str
) -> None:
    entry = grids[1]["estimators"][estimator][place]
    assert len(entry["got"]) == len(entry["expected"]) == 2
    for got, expected in zip(entry["got"], entry["expected"], strict=True):
        assert got["actor_grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        for name in ("policy_loss", "ppo_kl", "ppo_clip_ratio", *(("kl",) if place == "loss" else ())):
            assert got[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert max(step["actor_grad_norm"] for step in entry["got"]) > 1e-3
    assert entry["masked"] == 0.0


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_the_kl_penalty_is_counted_in_one_place(grids: dict[int, dict[str, Any]], estimator: str) -> None:
    entries = grids[1]["estimators"][estimator]
    advantages = {place: entries[place]["advantages"] for place in PLACES}
    assert advantages["loss"] == advantages["none"]
    assert advantages["reward"] != advantages["none"]
