"""Metrics of rollouts and evaluations."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.metrics import (
    best_of,
    eval_metric_names,
    eval_metrics,
    extra_log_means,
    majority_reward,
    rollout_metrics,
)
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.utils.errors import ExplainedError

figures = functools.partial(rollout_metrics, max_new_tokens=8, max_len=64)


def sample(group: int, reward: float | None, *, actions: int = 2, prompt: int = 3, **options: Any) -> Trajectory:
    mask = np.array([False] * prompt + [True] * actions)
    return Trajectory(
        prompt_id=group,
        group_id=group,
        sample_index=0,
        token_ids=np.arange(prompt + actions),
        action_mask=mask,
        logprobs=None,
        weight_version=np.where(mask, 0, -1),
        reward=reward,
        score=options.pop("score", reward),
        **options,
    )


def test_every_sample_counts_once() -> None:
    long = sample(1, 0.0, actions=8, truncated=True, finish_reason="length")
    metrics = figures(
        [
            sample(0, 1.0, score=0.5),
            sample(0, 0.0, score=0.5),
            long,
            sample(1, 3.0, score=0.5),
        ],
    )
    assert metrics == pytest.approx(
        {
            "reward": 1.0,
            "score": 0.375,
            "response_length": 3.5,
            "total_length": 6.5,
            "truncated": 0.25,
            "response_clip_ratio": 0.25,
            "group_reward_std": np.mean([np.std([1, 0], ddof=1), np.std([0, 3], ddof=1)]),
            "rollout/reward_mean": 1.0,
            "rollout/reward_std": np.std([1, 0, 0, 3], ddof=1),
            "rollout/response_length_mean": 3.5,
            "rollout/response_length_max": 8.0,
            "rollout/truncated_rate": 0.25,
            "rollout/num_samples": 4.0,
        }
    )


def test_extra_logs_are_averaged_over_the_samples_that_have_them() -> None:
    logs: tuple[dict[str, float], ...] = ({"a": 1.0, "b": 7.0}, {}, {"a": 4.0, "reward": 9.0})
    samples = [sample(0, 0.0, extra_logs=own) for own in logs]
    assert extra_log_means(samples) == {"a": 2.5, "b": 7.0, "reward": 9.0}
    assert figures(samples)["reward"] == 0.0


def test_an_extra_log_that_is_not_finite_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    logs = [{"speed": 1.0, "ratio": math.nan}, {"speed": math.inf}, {"speed": 4.0}]
    samples = [sample(0, 0.0, extra_logs=own) for own in logs]
    for _ in range(2):
        assert extra_log_means(samples) == {"speed": 2.5}
    told = sorted(record.getMessage().split("'")[1] for record in caplog.records)
    assert told == ["ratio", "speed"] and "NaN or infinite for some samples" in caplog.text


def test_the_clip_ratio_counts_what_a_limit_has_cut() -> None:
    cut = sample(0, 1.0, prompt=4, actions=6, truncated=True, finish_reason="length")  # by max_len 10
    whole = sample(0, 1.0, prompt=2, actions=6)
    at_the_limit = sample(0, 1.0, prompt=2, actions=8)  # its last token may be the end token
    for limit, share in ((None, 2 / 3), (8, 2 / 3), (6, 1.0)):
        metrics = rollout_metrics([cut, whole, at_the_limit], max_new_tokens=limit, max_len=10)
        assert metrics["response_clip_ratio"] == pytest.approx(share)
        assert metrics["truncated"] == pytest.approx(1 / 3)


def test_a_trajectory_of_many_turns_weighs_no_more() -> None:
    turns = sample(1, 0.0, actions=4, step_rewards=((3, 0.0), (4, 0.0), (5, 0.0), (6, 0.0)))
    assert figures([sample(0, 1.0), turns])["reward"] == 0.5


def test_groups_may_differ_in_size_and_order() -> None:
    samples = [sample(g, r) for g, r in ((0, 1.0), (1, 0.0), (0, 1.0), (2, 7.0), (1, 2.0), (0, 1.0))]
    assert figures(samples)["group_reward_std"] == pytest.approx(np.mean([0.0, np.sqrt(2)]))
    assert "group_reward_std" not in figures([sample(0, 1.0), sample(1, 0.0)])
    assert figures([sample(0, 1.0)])["rollout/reward_std"] == 0.0


def test_rewards_by_source() -> None:
    metrics = figures([sample(0, 1.0, metadata={"datasource": "math"}), sample(1, 0.0), sample(2, 1.0)])
    assert (metrics["reward/math"], metrics["reward/default"]) == (1.0, 0.5)
    assert "reward/default" not in figures([sample(1, 0.0), sample(2, 1.0)])


def test_rewards_that_are_not_there_yet_are_left_out() -> None:
    metrics = figures([sample(0, None)])
    assert "reward" not in metrics and "score" not in metrics and metrics["response_length"] == 2.0
    assert figures([]) == {}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_evaluation_pools_all_samples(order: list[int]) -> None:
    flags = [1.0, 0.0, 1.0, 1.0, 0.0]
    samples = [sample(i, flags[i]) for i in order]
    metrics = eval_metrics(samples, 1)
    assert metrics["eval_default_pass1"] == pytest.approx(0.6)
    assert metrics["eval_num_samples"] == 5


def test_evaluation_by_source() -> None:
    gsm = {"metadata": {"datasource": "gsm"}}
    samples = [
        sample(0, 0.0, **gsm),
        sample(1, 0.0, actions=6, truncated=True, finish_reason="length"),
        sample(0, 1.0, **gsm),
        sample(1, 0.0),
        sample(2, 0.0, **gsm),
        sample(2, 0.0, **gsm),
    ]
    assert eval_metrics(samples, 2) == pytest.approx(
        {
            "eval_default_pass2": 0.0,
            "eval_default_pass1": 0.0,
            "eval_default_mean2": 0.0,
            "eval_default_maj2": 0.0,
            "eval_default_response_length_mean": 4.0,
            "eval_default_truncated_rate": 0.5,
            "eval_gsm_pass2": 0.5,
            "eval_gsm_pass1": 0.25,
            "eval_gsm_mean2": 0.25,
            # prompts' means 0.5 and 0: standard deviation 0.25 * sqrt(2), over the root of two prompts
            "eval_gsm_mean2_ci95": 1.96 * 0.25,
            "eval_gsm_maj2": 0.25,
            "eval_gsm_response_length_mean": 2.0,
            "eval_gsm_truncated_rate": 0.0,
            "eval_response_length_mean": 16 / 6,
            "eval_truncated_rate": 1 / 6,
            "eval_num_samples": 6.0,
        }
    )
    assert eval_metrics([], 2) == {}
    with pytest.raises(ExplainedError, match="evaluation sample 0 of prompt 3 has no reward"):
        eval_metrics([sample(3, None)], 1)
    with pytest.raises(ValueError, match="evaluation prompt 3 has 1 samples, not 2"):
        eval_metrics([sample(3, 1.0)], 2)


@pytest.mark.parametrize("rewards", [[0, 1, 0, 0, 1, 0], [0, 0, 0], [0.5, -1, 2, 2, 0.25], [1]])
def test_best_of_k_is_the_mean_over_all_choices(rewards: list[float]) -> None:
    for k in range(1, len(rewards) + 1):
        choices = [max(chosen) for chosen in itertools.combinations(rewards, k)]
        assert best_of(rewards, k) == pytest.approx(np.mean(choices), abs=1e-12)
        if set(rewards) <= {0, 1}:
            share_without = math.comb(rewards.count(0), k) / math.comb(len(rewards), k)
            assert best_of(rewards, k) == pytest.approx(1 - share_without)


def test_pass_at_powers_of_two_and_of_all_samples() -> None:
    rewards = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    metrics = eval_metrics([sample(0, reward) for reward in rewards], 6)
    passes = {name: value for name, value in metrics.items() if "_pass" in name}
    assert passes == pytest.approx({f"eval_default_pass{k}": best_of(rewards, k) for k in (1, 2, 4, 6)})
    assert passes["eval_default_pass1"] == pytest.approx(1 / 3) and passes["eval_default_pass6"] == 1
    assert "eval_default_mean6_ci95" not in metrics  # one prompt says nothing about others


@pytest.mark.parametrize(
    ("votes", "reward"),
    [
        ([("so \\boxed{0.5}<eos>", 1.0), ("\\boxed{1/2}", 1.0), ("\\boxed{3}", 0.0)], 1.0),
        ([("7", 0.0), ("7.0<|im_end|>", 0.0), ("<think>7</think> 8", 1.0)], 0.0),
        ([("1", 1.0), ("2", 0.0)], 0.5),  # a tie
        ([("a b", 1.0), ("ab", 0.5), ("", 0.0)], 0.75),
    ],
)
def test_the_majority_answer(votes: list[tuple[str, float]], reward: float) -> None:
    assert majority_reward([sample(0, value, metadata={"response": text}) for text, value in votes]) == reward


@pytest.mark.parametrize(("prompts", "n"), [({"a": 2, "b": 1}, 1), ({"a": 1}, 4), ({"a": 2}, 2), ({"default": 3}, 6)])
def test_the_names_of_metrics_are_known_before_there_are_samples(prompts: dict[str, int], n: int) -> None:
    owners = [name for name, count in prompts.items() for _ in range(count)]
    samples = [sample(g, 1.0, metadata={"datasource": name}) for g, name in enumerate(owners) for _ in range(n)]
    assert eval_metric_names(prompts, n) == sorted(eval_metrics(samples, n))
