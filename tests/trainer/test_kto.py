"""train_kto: losses against float64 references over several steps, layouts, resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from preference_reference import Policy, batches, weights_differ

from openrlhf.algorithms.losses import kto_loss, kto_reference_point
from openrlhf.trainer.kto import MismatchedAnswers

LAYOUTS = ["packed", "zero3", "zero0", "cut", "ranks2", "ranks2_packed_zero3", "ranks2_micro1", "ranks2_divided"]
BETA = 0.1


class FakeData:
    """Row i: i + 1 tokens of prompt (10 i), then 3 of answer (10 i + 5)."""

    lengths = np.array([4, 5, 6, 7])
    answer_lengths = np.array([3, 3, 3, 3])

    def fetch(self, indices: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.array([10 * i] * (i + 1) + [10 * i + 5] * 3), np.arange(i + 4) > i) for i in indices]


class TestWithoutEngine:
    def test_answers_are_those_of_the_next_row_of_the_batch(self) -> None:
        mismatched = MismatchedAnswers(FakeData(), [2, 0, 1, 3], 2, max_len=5)
        assert mismatched.lengths.tolist() == [5, 4, 5, 5]
        (first, mask), (second, _), (third, _), (fourth, _) = mismatched.fetch(range(4))
        assert first.tolist() == [20, 20, 20, 5, 5] and mask.tolist() == [False] * 3 + [True] * 2
        assert second.tolist() == [0, 25, 25, 25]
        assert third.tolist() == [10, 10, 35, 35, 35]
        assert fourth.tolist() == [30, 30, 30, 30, 15]

    def test_loss_in_float64(self) -> None:
        logprobs = torch.tensor([-3.0, -5.0, -2.0], dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([-4.0, -4.0, -2.5], dtype=torch.float64)
        good = torch.tensor([True, False, True])
        kl = kto_reference_point(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
        assert kl == 0.25
        result = kto_loss(logprobs, reference, good, kl, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
        value = 1 / (1 + np.exp(-0.5 * np.array([1.0 - 0.25, 0.25 + 1.0, 0.5 - 0.25])))
        assert result.per_answer.tolist() == pytest.approx(np.array([2.0, 3.0, 2.0]) * (1 - value), abs=1e-12)
        assert result.rewards.tolist() == [0.5, -0.5, 0.25]
        result.per_answer.sum().backward()
        assert logprobs.grad[0] < 0 < logprobs.grad[1]

    def test_reference_point_is_never_negative(self) -> None:
        assert kto_reference_point(torch.tensor([-2.0]), torch.tensor([-1.0])) == 0.0


def plain_run(runs: Any, good_weight: float = 1.0, bad_weight: float = 1.0) -> list[dict[str, float]]:
    """Three steps of the paper's algorithm with AdamW, in float64."""
    policy, reference = Policy(runs.folder / "model"), Policy(runs.folder / "model")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for rows in batches(runs.rows("labelled.jsonl")):
        shifted = [{"prompt": a["input"], "y": b["output"]} for a, b in zip(rows, rows[1:] + rows[:1], strict=True)]
        with torch.no_grad():
            kl = max(0.0, float(policy.ratios(reference, shifted, "y").mean()))
        ratios = policy.ratios(reference, [{"prompt": r["input"], "y": r["output"]} for r in rows], "y")
        losses = [
            good_weight * (1 - torch.sigmoid(BETA * (ratio - kl)))
            if row["label"]
            else bad_weight * (1 - torch.sigmoid(BETA * (kl - ratio)))
            for row, ratio in zip(rows, ratios, strict=True)
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0))
        optimizer.step()
        rewards = [BETA * float(ratio) for ratio in ratios.detach()]
        good = [reward for row, reward in zip(rows, rewards, strict=True) if row["label"]]
        found.append({"kto_loss": loss.item(), "kl": kl, "grad_norm": norm, "chosen_reward": sum(good) / len(good)})
    return found


@pytest.mark.e2e
class TestRuns:
    @pytest.mark.parametrize(("name", "weights"), [("base", ()), ("weights", (2.0, 0.5))])
    def test_three_steps_in_float64(self, preference_runs: Any, name: str, weights: tuple[float, ...]) -> None:
        expected = plain_run(preference_runs, *weights)
        assert expected[-1]["kl"] > 0, "otherwise the estimate is not tested"
        for metric in expected[0]:
            got = preference_runs.values(f"train_kto/{name}", metric)
            assert got[0] == pytest.approx(expected[0][metric], abs=1e-6)
            assert got == pytest.approx([step[metric] for step in expected], rel=1e-3, abs=1e-4), metric

    def test_metrics_have_the_known_names(self, preference_runs: Any) -> None:
        names = {"kto_loss", "chosen_reward", "reject_reward", "lr", "kl", "loss_mean"}
        assert names <= set(preference_runs.lines("train_kto/base")[0])
        evaluation = preference_runs.lines("train_kto/base", "eval")
        assert [line["step"] for line in evaluation] == [3]
        assert {"eval_loss", "chosen_reward", "reject_reward"} <= set(evaluation[0])

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_does_not_change_the_training(self, preference_runs: Any, layout: str) -> None:
        for metric in ("kto_loss", "kl", "chosen_reward", "reject_reward", "grad_norm"):
            base = preference_runs.values("train_kto/base", metric)
            got = preference_runs.values(f"train_kto/{layout}", metric)
            assert got == pytest.approx(base, abs=2e-6, rel=1e-6), metric
        for metric in ("eval_loss", "chosen_reward", "reject_reward"):
            base = preference_runs.values("train_kto/base", metric, "eval")
            assert preference_runs.values(f"train_kto/{layout}", metric, "eval") == pytest.approx(base, abs=1e-6)

    def test_evaluation_in_float64(self, preference_runs: Any) -> None:
        policy = Policy(preference_runs.folder / "train_kto" / "base" / "model")
        reference = Policy(preference_runs.folder / "model")
        rows = preference_runs.rows("eval_labelled.jsonl")
        shifted = [{"prompt": a["input"], "y": b["output"]} for a, b in zip(rows, rows[1:] + rows[:1], strict=True)]
        with torch.no_grad():
            kl = max(0.0, float(policy.ratios(reference, shifted, "y").mean()))
            ratios = policy.ratios(reference, [{"prompt": r["input"], "y": r["output"]} for r in rows], "y")
        sign = torch.tensor([1.0 if row["label"] else -1.0 for row in rows])
        expected = float((1 - torch.sigmoid(BETA * sign * (ratios - kl))).mean())
        line = preference_runs.lines("train_kto/base", "eval")[0]
        assert line["eval_loss"] == pytest.approx(expected, abs=1e-5)

    def test_resume_equals_an_uninterrupted_run_bit_for_bit(self, preference_runs: Any) -> None:
        for metric in ("kto_loss", "kl"):
            base, again = (preference_runs.values(f"train_kto/{name}", metric) for name in ("base", "again"))
            assert again == [*base, base[-1]]
        assert weights_differ(preference_runs.folder / "train_kto", "base", "again") == 0

    def test_a_run_that_is_made_longer(self, preference_runs: Any) -> None:
        """As in test_dpo.py."""
        for metric in ("kto_loss", "kl"):
            base, resumed = (preference_runs.values(f"train_kto/{name}", metric) for name in ("base", "resume"))
            assert len(base) == 3 and resumed == pytest.approx(base, rel=1e-6)
        assert weights_differ(preference_runs.folder / "train_kto", "base", "resume") < 1e-6

    def test_the_command_of_the_docs(self, preference_runs: Any) -> None:
        """It works as it is written; with a column that isn't there it ends with status 1 and says so."""
        assert preference_runs.statuses("train_kto") == [0, 1]
        log = (preference_runs.folder / "log_1_0.txt").read_text()
        assert "error: ./labelled.jsonl has no column for --label_key 'missing'; its columns are: " in log
