"""Evaluation with a scripted pool of engines: every prompt of every set, the same seeds each time, nothing lost."""

from __future__ import annotations

import pytest
from scripted_run import TOK, Pool, rows

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow
from openrlhf.trainer.console import Console
from openrlhf.trainer.evaluation import evaluate


def evaluated(pool: Pool, rows: list[PromptRow], step: int, n: int = 4) -> dict[str, float]:
    return evaluate(PPOConfig(eval_n_samples_per_prompt=n), pool, rows, Console(), None, step)  # type: ignore[arg-type]


def test_every_prompt_of_every_set_is_in_the_figures() -> None:
    pool = Pool()
    data = rows(("d", "one"), ("e", "two"), ("f", "one"), ("g", "two"), ("h", "two"))
    metrics = evaluated(pool, data, 3)
    by_prompt = {TOK.encode(row.text)[0]: row for row in data}
    right = [(by_prompt[prompt], seed % 2 == 0) for prompt, seed in pool.sampled]
    assert len(right) == len(set(pool.sampled)) == metrics["eval_num_samples"] == 20
    for source in ("one", "two"):
        own = [good for row, good in right if row.datasource == source]
        assert metrics[f"eval_{source}_pass1"] == metrics[f"eval_{source}_mean4"] == pytest.approx(sum(own) / len(own))
        for name in ("pass2", "pass4", "maj4", "mean4_ci95", "truncated_rate"):
            assert 0 <= metrics[f"eval_{source}_{name}"] <= 1
    again = Pool()
    assert evaluated(again, data, 9) == metrics and again.sampled == pool.sampled


def test_a_lost_sample_counts_as_zero_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    data = rows(("d", "one"), ("z", "one"))
    metrics = evaluated(Pool(), data, 2, 2)
    assert (
        "evaluation at step 2 lost 2 of 4 samples, which count as 0, the first of prompt 1" in capsys.readouterr().out
    )
    assert (metrics["eval_num_samples"], metrics["eval_lost_samples"]) == (4, 2)
    alone = evaluated(Pool(), data[:1], 2, 2)
    assert metrics["eval_one_mean2"] == alone["eval_one_mean2"] / 2 > 0
    assert "eval_lost_samples" not in alone


def test_without_prompts_there_is_nothing_to_do() -> None:
    assert evaluated(Pool(), [], 1) == {}
