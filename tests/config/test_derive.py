"""The arithmetic of runs, by hand and by counting."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from config_cases import write

from openrlhf.config import PPOConfig, build
from openrlhf.config.derive import (
    count_rows,
    derive,
    gpus_per_role,
    optimizer_steps,
    prompt_limit,
)


def ppo(**values: Any) -> Any:
    given = {"pretrain": "a/b", "prompt_data": "c/d", "remote_rm_url": "http://127.0.0.1:9"}
    return build("train_ppo_ray", **{**given, "actor_num_gpus_per_node": 1, **values})


def dpo(**values: Any) -> Any:
    return build("train_dpo", **{"pretrain": "a/b", "dataset": "c/d", **values})


def test_ppo_steps() -> None:
    config = ppo(rollout_batch_size=8, n_samples_per_prompt=4, train_batch_size=16, max_epochs=2, num_episodes=3)
    derived = derive(config, num_rows=40)
    assert derived.total_steps == 60
    assert (derived.samples_per_rollout, derived.steps_per_rollout, derived.num_rollouts) == (32, 4, 15)
    assert (derived.micro_batches_per_step, derived.forward_micro_batches) == (4, 4)
    assert derived.warmup_steps == 2  # 60 * 0.03 = 1.8, rounded up


def test_dpo_steps() -> None:
    config = dpo(train_batch_size=16, micro_train_batch_size=2, max_epochs=4)
    derived = derive(config, num_rows=110)
    assert derived.total_steps == 27
    assert derived.micro_batches_per_step == 8


def test_ppo_steps_by_counting() -> None:
    """Against a walk over the prompts, with incomplete last rollouts, a step limit and a frozen actor."""
    for rows, episodes, epochs, limit, frozen in itertools.product(
        (1, 7, 8, 9, 20), (1, 3), (1, 2), (-1, 1, 3, 4, 100), (-1, 0, 4)
    ):
        config = ppo(
            rollout_batch_size=8,
            n_samples_per_prompt=2,
            train_batch_size=4,
            num_episodes=episodes,
            max_epochs=epochs,
            max_steps=limit,
            freezing_actor_steps=frozen,
        )
        rollouts = steps = actor = 0
        for _ in range(episodes):
            for start in range(0, rows, 8):
                if limit > 0 and rollouts == limit:
                    break
                samples = 2 * min(8, rows - start)
                steps += epochs * len(range(0, samples, 4))
                actor += epochs * len(range(0, samples, 4)) if rollouts > frozen else 0
                rollouts += 1
        derived = derive(config, num_rows=rows)
        assert (derived.num_rollouts, derived.total_steps, derived.actor_steps) == (rollouts, steps, actor)


def test_steps_are_those_of_the_planner() -> None:
    from openrlhf.batching.plan import split_optimizer_steps

    for n, batch, prompts in itertools.product((1, 2, 3, 5, 12), (4, 6, 8), (1, 5, 8, 11)):
        config = PPOConfig(n_samples_per_prompt=n, train_batch_size=batch, max_epochs=1)
        groups = [group for group in range(prompts) for _ in range(n)]
        assert optimizer_steps(config, prompts) == len(split_optimizer_steps(groups, batch)), (
            n,
            batch,
            prompts,
        )


def test_step_limit_of_supervised_training() -> None:
    assert derive(dpo(max_epochs=4, train_batch_size=16, max_steps=5), num_rows=110).total_steps == 5
    assert derive(dpo(max_epochs=4, train_batch_size=16, max_steps=50), num_rows=110).total_steps == 27


def test_unknown_rows() -> None:
    for config in (ppo(), dpo()):
        derived = derive(config)
        assert derived.total_steps is derived.warmup_steps is derived.num_rows is None


def test_world_size_of_supervised_training() -> None:
    derived = derive(dpo(train_batch_size=32, micro_train_batch_size=2), world_size=4)
    assert (derived.data_parallel_size, derived.micro_batches_per_step, derived.total_gpus) == (4, 4, 4)


def test_dynamic_batches_have_no_fixed_number_of_micro_batches() -> None:
    derived = derive(ppo(use_dynamic_batch=True))
    assert derived.micro_batches_per_step is derived.forward_micro_batches is None


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ({}, 2047),
        ({"max_new_tokens": 1000}, 1048),
        ({"prompt_max_len": 300, "max_new_tokens": 100, "max_len": 2048}, 300),
        ({"prompt_max_len": 300, "generate_max_len": 100}, 300),
    ],
)
def test_prompt_limit(values: dict[str, Any], limit: int) -> None:
    assert prompt_limit(ppo(**values)) == limit


@pytest.mark.parametrize(
    ("values", "gpus", "total"),
    [
        ({}, {"actor": 1, "ref": 8, "critic": 8, "engine": 1}, 18),
        ({"init_kl_coef": 0.0, "advantage_estimator": "reinforce"}, {"actor": 1, "engine": 1}, 2),
        ({"colocate_all_models": True}, {"actor": 1, "ref": 1, "critic": 1, "engine": 1}, 1),
        (
            {"colocate_actor_ref": True, "advantage_estimator": "reinforce"},
            {"actor": 1, "ref": 1, "engine": 1},
            2,
        ),
        (
            {
                "remote_rm_url": None,
                "reward_pretrain": "r/m",
                "colocate_critic_reward": True,
                "init_kl_coef": 0,
            },
            {"actor": 1, "critic": 8, "reward": 8, "engine": 1},
            10,
        ),
        (
            {"vllm_num_engines": 2, "vllm_tensor_parallel_size": 2, "advantage_estimator": "reinforce"},
            {"actor": 1, "ref": 8, "engine": 4},
            13,
        ),
        ({"load_rollouts": ".", "advantage_estimator": "reinforce"}, {"actor": 1, "ref": 8}, 9),
        ({"rollout_only": True, "dump_rollouts": "dump"}, {"engine": 1}, 1),
    ],
)
def test_gpus(values: dict[str, Any], gpus: dict[str, int], total: int) -> None:
    assert gpus_per_role(ppo(**values)) == (gpus, total)


def test_rows_of_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": 2}\n\n{"a": 3}')
    second = write(tmp_path / "b.jsonl", '{"a": 1}\n' * 5)
    assert count_rows(dpo(dataset=f"{first},{second}")) == 8
    assert count_rows(ppo(prompt_data=f"{first}, {second}", max_samples=4)) == 4
    assert count_rows(dpo(dataset=f"{first},org/data")) is None
    for other in (write(tmp_path / "c.csv", "a\n1\n"), str(tmp_path)):
        assert count_rows(dpo(dataset=f"{first},{other}")) is None
    assert count_rows(dpo(dataset=first, dataset_split="train[:50%]")) is None
    assert count_rows(dpo(dataset=f"{first},{second}", dataset_probs="0.5,0.5")) is None
