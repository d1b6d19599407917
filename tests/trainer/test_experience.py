"""From trajectories to optimizer steps: order, rewards, denominators, and the same data in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from openrlhf.config import PPOConfig, build
from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.experience import (
    POLICY_COLUMNS,
    Experience,
    add_advantages,
    collect,
    forward_batches,
    optimizer_steps,
    sample_metrics,
    sequence_outputs,
    shaped_rewards,
    step_batches,
    token_outputs,
    with_model_scores,
)
from openrlhf.utils.errors import ExplainedError


@pytest.fixture
def cfg(tmp_path: Path) -> PPOConfig:
    data, reward = tmp_path / "data.jsonl", tmp_path / "reward.py"
    data.write_text('{"input": "1"}\n')
    reward.write_text("def reward_func(queries, prompts, labels): ...\n")
    return config(data, reward)


def config(data: Path, reward: Path, **flags: object) -> PPOConfig:
    values: dict[str, object] = {
        "pretrain": str(data.parent),
        "prompt_data": str(data),
        "remote_rm_url": str(reward),
        "advantage_estimator": "group_norm",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "micro_rollout_batch_size": 2,
        "actor_num_gpus_per_node": 1,
        "max_new_tokens": 8,
        "max_len": 16,
    }
    result = build("train_ppo_ray", **(values | flags))
    assert isinstance(result, PPOConfig)
    return result


def sample(group: int, index: int, length: int, reward: float | None, **more: object) -> Trajectory:
    mask = np.arange(length + 2) >= 2
    values: dict[str, object] = {
        "prompt_id": 100 + group, "group_id": group, "sample_index": index,
        "token_ids": np.arange(length + 2) + 10 * group + index, "action_mask": mask, "logprobs": None,
        "weight_version": np.where(mask, 0, -1), "reward": reward, "score": reward,
    }  # fmt: skip
    return Trajectory(**(values | more))  # type: ignore[arg-type]


def rollout() -> list[list[Trajectory]]:
    """Three groups that finished in another order than they were drawn, one with a single sample."""
    return [
        [sample(2, 0, 3, 5.0)],
        [sample(0, 1, 4, 1.0), sample(0, 0, 2, 0.0)],
        [sample(1, 0, 5, 2.0), sample(1, 1, 1, 4.0)],
    ]


def test_groups_come_into_a_fixed_order() -> None:
    experience = collect(rollout())
    assert [(t.group_id, t.sample_index) for t in experience.trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert "rollout_logprobs" not in experience.columns


def test_log_probs_of_some_samples_only_are_an_error() -> None:
    groups = rollout()
    length = groups[1][0].total_length
    groups[1][0] = sample(0, 1, 4, 1.0, logprobs=np.zeros(length, dtype=np.float32))
    with pytest.raises(ExplainedError, match=r"4 of 5 samples have no sampling log-probs, the first of prompt 100"):
        collect(groups)


def test_a_missing_reward_names_the_sample(cfg: PPOConfig) -> None:
    experience = collect([[sample(3, 0, 2, None), sample(3, 1, 2, 1.0)]])
    with pytest.raises(ExplainedError, match="sample 0 of prompt 103"):
        add_advantages(experience, cfg, 0.0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_outputs_of_ranks_come_back_in_order(cfg: PPOConfig, ranks: int) -> None:
    experience = collect(rollout())
    sequences = [t.token_ids for t in experience.trajectories]
    batches = forward_batches(sequences, ranks, cfg)
    assert len(batches) == ranks and len({len(rank) for rank in batches}) == 1
    tokens = [[batch.input_ids.float().numpy() for batch in rank] for rank in batches]
    for column, ids in zip(token_outputs(batches, tokens, 5), sequences, strict=True):
        assert column.tolist() == ids.tolist()
    firsts = [[batch.input_ids[batch.cu_seqlens[:-1].long()].numpy() for batch in rank] for rank in batches]
    assert sequence_outputs(batches, firsts, 5).tolist() == [float(ids[0]) for ids in sequences]


def test_a_sample_beyond_the_token_budget_is_alone_in_its_micro_batch(cfg: PPOConfig) -> None:
    cfg = replace(cfg, use_dynamic_batch=True, train_max_tokens_per_gpu=8, rollout_max_tokens_per_gpu=8)
    sequences = [np.arange(1, n + 1, dtype=np.int32) for n in (3, 13, 5, 4, 2)]
    (rank,) = forward_batches(sequences, 1, cfg)
    tokens = [len(batch.input_ids) for batch in rank]
    assert sorted(tokens) in ([6, 8, 13], [7, 7, 13]) and rank[tokens.index(13)].num_sequences == 1
    assert len(forward_batches(sequences[2:], 1, cfg)[0]) == 2


def test_each_pass_has_its_own_limit_of_a_micro_batch(cfg: PPOConfig) -> None:
    experience = collect(rollout())  # 4, 6, 7, 3 and 5 tokens
    add_advantages(experience, cfg, 0.0)
    sequences = [t.token_ids for t in experience.trajectories]

    def sizes(cfg: PPOConfig) -> tuple[list[int], list[int]]:
        (forward,) = forward_batches(sequences, 1, cfg)
        ((step,),) = step_batches(experience, [range(5)], 1, cfg, POLICY_COLUMNS, 0.0)
        what = "num_tokens" if cfg.use_dynamic_batch else "num_sequences"
        return [getattr(b, what) for b in forward], [getattr(b, what) for b in step.micro_batches]

    by_samples = replace(cfg, micro_rollout_batch_size=3, micro_train_batch_size=1)
    assert [len(batches) for batches in sizes(by_samples)] == [2, 5]
    by_tokens = replace(cfg, use_dynamic_batch=True, rollout_max_tokens_per_gpu=25, train_max_tokens_per_gpu=13)
    forward, training = sizes(by_tokens)
    assert forward == [25] and len(training) == 2 and max(training) <= 13
    assert len(sizes(replace(by_tokens, rollout_max_tokens_per_gpu=None))[0]) == 2
    assert sizes(replace(by_tokens, ring_attn_size=2))[1] == [25]  # two ranks share a row


@pytest.mark.parametrize(
    ("flags", "column", "expected"),
    [
        # A2 = 1 - 0.4, A1 = 0.9 * 0.4 - 0.2 + 0.9 * 0.5 * A2; returns are A + V
        ({"advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.5}, "returns", [0.63, 1.0]),
        ({"advantage_estimator": "reinforce", "gamma": 0.5}, "returns", [0.625, 0.75]),  # a quarter was earned before
        ({"advantage_estimator": "dr_grpo", "reward_clip_range": (-0.2, 0.3)}, "returns", [0.3, 0.3]),
        ({"advantage_estimator": "reinforce", "no_advantage_std_norm": True}, "advantages", [0.78125, 0.53125]),
        # four of the six pairs of responses hold the best one: 1 - 1/2 in deviations of 1/2
        ({"advantage_estimator": "pass_at_k", "pass_k": 2}, "advantages", [1.0, 1.0]),
        ({"advantage_estimator": "pass_at_k", "pass_k": 3}, "advantages", [3**-0.5, 3**-0.5]),
    ],
)
def test_flags_of_estimators_reach_them(
    cfg: PPOConfig, flags: dict[str, object], column: str, expected: list[float]
) -> None:
    steps = ((2, 0.25),) if flags["advantage_estimator"] == "reinforce" else ()
    best = sample(0, 0, 2, 1.0, step_rewards=steps)
    experience = collect([[best, *(sample(0, index, 2, 0.0) for index in (1, 2, 3))]])
    experience.columns["old_values"] = [torch.tensor([7.0, 7.0, 0.2, 0.4])] * 4
    add_advantages(experience, replace(cfg, **flags), 0.0)
    assert experience.columns[column][0][2:].tolist() == pytest.approx(expected)


def test_step_rewards_are_earned_at_their_places_in_each_sample(cfg: PPOConfig) -> None:
    experience = collect([[sample(0, 0, 2, 1.0), sample(0, 1, 3, 0.5, step_rewards=((2, 0.25), (3, 0.25)))]])
    add_advantages(experience, replace(cfg, advantage_estimator="reinforce"), 0.0)
    assert [column.tolist() for column in experience.columns["returns"]] == [[0, 0, 1, 1], [0, 0, 0.5, 0.25, 0]]


def test_the_overlong_penalty_has_a_factor(cfg: PPOConfig) -> None:
    limits = replace(cfg, max_new_tokens=8, overlong_buffer_len=4.0, overlong_penalty_factor=0.5)
    assert shaped_rewards([sample(0, 0, 6, 1.0), sample(0, 1, 8, 1.0)], limits).tolist() == [0.75, 0.5]


def test_a_rollout_of_one_step_has_no_old_log_probs_to_compare(cfg: PPOConfig) -> None:
    experience = collect(rollout())
    experience.columns["ref_logprobs"] = [torch.full((n,), -1.5) for n in experience.lengths]
    assert "kl" not in add_advantages(experience, replace(cfg, use_kl_loss=True), 0.1)


def test_advantages_of_uneven_groups_keep_to_their_own_tokens(cfg: PPOConfig) -> None:
    experience = collect(rollout())
    assert "kl" not in add_advantages(experience, cfg, 0.0)
    root = 1 / np.sqrt(2)  # (r - mean) / sample standard deviation of two rewards
    for t, advantage, value in zip(
        experience.trajectories, experience.columns["advantages"], (-root, root, -root, root, 0.0), strict=True
    ):
        assert advantage.tolist() == pytest.approx([0.0, 0.0] + [value] * t.response_length, abs=1e-6)


def test_greedy_baselines_are_shaped_like_rewards_and_never_trained_on(cfg: PPOConfig) -> None:
    """The greedy response to prompt 0 is cut off: its reward of 1 becomes 0.5."""
    greedy = [sample(2, 1, 3, 4.0), sample(0, 2, 4, 1.0, truncated=True), sample(1, 2, 2, 2.0)]
    remax = config(Path(cfg.prompt_data or ""), Path(cfg.remote_rm_url or ""), advantage_estimator="remax",
                   stop_properly_penalty_coef=0.5)  # fmt: skip
    experience = collect(rollout(), greedy)
    metrics = add_advantages(experience, remax, 0.0)
    assert metrics["rollout/greedy_reward_mean"] == pytest.approx(np.mean([0.5, 0.5, 2, 2, 4]))
    assert [float(a[-1]) for a in experience.columns["advantages"]] == [-0.5, 0.5, 0, 2, 1]
    steps = step_batches(experience, [list(range(5))], 1, remax, POLICY_COLUMNS, kl_coef=0.0)
    trained = sum(int(batch.columns["action_mask"].sum()) for batch in steps[0][0].micro_batches)
    assert trained == sum(t.response_length for t in experience.trajectories)
    scored = experience.with_scores(np.arange(8.0))
    assert [t.reward for t in scored.trajectories] == [0, 1, 2, 3, 4] and [t.reward for t in scored.baselines] == [
        5,
        6,
        7,
    ]
    assert len(scored) == 5 and scored.columns is experience.columns


def test_length_penalties_go_by_what_the_limit_left(cfg: PPOConfig) -> None:
    """Without --max_new_tokens, and for agents, that is what the prompt leaves of --max_len."""

    def shaped(cfg: PPOConfig, mask: str, **more: object) -> tuple[float, float]:
        actions = np.array([digit == "1" for digit in mask])
        one = sample(0, 0, len(mask) - 2, 1.0, action_mask=actions, weight_version=np.where(actions, 0, -1), **more)
        return shaped_rewards([one], cfg).item(), sample_metrics([one], cfg)["response_clip_ratio"]

    whole = replace(cfg, max_new_tokens=None, max_len=100, overlong_buffer_len=10.0)
    prompt = "0" * 40
    assert shaped(whole, prompt + "1" * 60, truncated=True) == (0.0, 1.0)
    assert shaped(whole, prompt + "1" * 55) == (0.5, 0.0)
    assert shaped(whole, prompt + "1" * 50) == (1.0, 0.0)
    turns = replace(cfg, max_new_tokens=10, max_len=100, overlong_buffer_len=2.0)
    assert shaped(turns, prompt + "1" * 6 + "00" + "1" * 6 + "00" + "1" * 6) == (1.0, 0.0)
    assert shaped(turns, prompt + "1" * 6 + "00" + "1" * 9) == (0.5, 0.0)
    assert shaped(turns, "0" * 80 + "1" * 6 + "0" * 8 + "1" * 5) == (0.5, 0.0)  # one token is left of --max_len
    assert shaped(turns, "0" * 80 + "1" * 10, truncated=True) == (0.0, 1.0)
    agent = replace(turns, agent_func_path="agent.py")
    assert shaped(agent, prompt + "1" * 6 + "00" + "1" * 20) == (1.0, 0.0)  # no turn has that limit
    assert shaped(agent, prompt + "1" * 6 + "00" + "1" * 20, truncated=True) == (0.0, 1.0)  # one had its own
    assert shaped(agent, prompt + "1" * 6 + "00" + "1" * 51) == (0.5, 0.0)


def test_step_rewards_stay_where_they_were_earned(cfg: PPOConfig) -> None:
    steps = ((2, 0.5), (4, 0.25), (2, 1.0))
    experience = collect([[sample(0, 0, 3, 1.75)], [sample(1, 0, 3, 3.0, step_rewards=steps)]])
    settings = replace(cfg, advantage_estimator="reinforce", no_advantage_std_norm=True)
    add_advantages(experience, settings, 0.0)
    assert experience.columns["returns"][0].tolist() == [0, 0, 1.75, 1.75, 1.75]
    assert experience.columns["returns"][1].tolist() == [0, 0, 3.0, 1.5, 1.5]


def test_kl_in_the_reward_lowers_the_return_and_kl_in_the_loss_does_not(cfg: PPOConfig) -> None:
    def returns(use_kl_loss: bool) -> tuple[float, float]:
        experience = collect(rollout())
        lengths = experience.lengths
        experience.columns["old_logprobs"] = [torch.full((n,), -1.0) for n in lengths]
        experience.columns["ref_logprobs"] = [torch.full((n,), -1.5) for n in lengths]
        own = config(Path(cfg.prompt_data or ""), Path(cfg.remote_rm_url or ""), use_kl_loss=use_kl_loss,
                     advantage_estimator="reinforce", kl_estimator="k2" if use_kl_loss else "k1")  # fmt: skip
        metrics = add_advantages(experience, own, 0.1)
        return metrics["return"], metrics["kl"]

    in_reward, kl = returns(False)
    assert kl == pytest.approx(0.5)
    # 0.1 * 0.5 for each of 2, 4, 5, 1 and 3 action tokens
    assert in_reward == pytest.approx(np.mean([0 - 0.1, 1 - 0.2, 2 - 0.25, 4 - 0.05, 5 - 0.15]))
    in_loss, kl = returns(True)
    assert kl == pytest.approx(0.125)
    assert in_loss == pytest.approx(np.mean([0, 1, 2, 4, 5]))


def test_scores_of_a_reward_model_must_be_finite() -> None:
    trajectories = collect(rollout()).trajectories
    scored = with_model_scores(trajectories, np.arange(5.0))
    assert [t.reward for t in scored] == [t.score for t in scored] == [0, 1, 2, 3, 4]
    with pytest.raises(FloatingPointError, match=r"not finite for prompts \[101\]"):
        with_model_scores(trajectories, np.array([0, 1, np.nan, 3, 4]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", POLICY_COLUMNS)
def test_a_column_that_is_not_finite_names_its_samples(cfg: PPOConfig, name: str, value: float) -> None:
    experience = collect(rollout())
    for column in POLICY_COLUMNS:
        experience.columns[column] = [torch.zeros(length) for length in experience.lengths]
    place, mask = 2, experience.action_masks[2]
    experience.columns[name][place][~mask] = value  # no business of the loss's
    step_batches(experience, [range(5)], 1, cfg, POLICY_COLUMNS, 0.0)
    experience.columns[name][place][int(mask.nonzero()[-1])] = value
    wrong = experience.trajectories[place]
    words = f"{name} is NaN or infinite .* 1 of 5 samples: prompt {wrong.prompt_id} sample {wrong.sample_index}"
    with pytest.raises(FloatingPointError, match=words):
        step_batches(experience, [range(5)], 1, cfg, POLICY_COLUMNS, 0.0)


def test_every_sample_is_in_one_step_an_epoch_and_groups_stay_together(cfg: PPOConfig) -> None:
    group_ids = [t.group_id for t in collect(rollout()).trajectories]
    two = config(Path(cfg.prompt_data or ""), Path(cfg.remote_rm_url or ""), max_epochs=2)
    steps = optimizer_steps(group_ids, two, seed=(1, 0))
    assert steps == optimizer_steps(group_ids, two, seed=(1, 0))
    counted = sorted(i for step in steps for i in step)
    assert counted == sorted(list(range(5)) * 2)
    for step in steps:
        assert len(step) <= 4
        for group in {group_ids[i] for i in step}:
            assert [i for i in range(5) if group_ids[i] == group and i not in step] == []


def test_groups_are_shuffled_anew_in_every_epoch_by_the_seed(cfg: PPOConfig) -> None:
    group_ids = [group for group in range(12) for _ in range(2)]
    orders = set()
    for seed in ((1, 0), (1, 1), (2, 0)):
        steps = optimizer_steps(group_ids, replace(cfg, max_epochs=2), seed)
        flat = [index for step in steps for index in step]
        orders |= {tuple(flat[:24]), tuple(flat[24:])}
    assert len(orders) == 6 and tuple(range(24)) not in orders


@pytest.mark.parametrize(("parts", "steps"), [(1, 1), (2, 2), (4, 4), (6, 6)])
def test_the_schedule_goes_by_prompts(cfg: PPOConfig, parts: int, steps: int) -> None:
    """Whatever number of samples a hook makes of a prompt, where two were planned: the rollout is as long."""
    experience = collect([[sample(group, part, 3, float(part)) for part in range(parts)] for group in range(4)])
    add_advantages(experience, cfg, 0.0)
    plan = optimizer_steps([t.group_id for t in experience.trajectories], cfg, seed=(0, 0))
    (batches,) = step_batches(experience, plan, 1, cfg, POLICY_COLUMNS, 0.0)
    assert len(batches) == len(plan) == steps
    assert [batch.progress for batch in batches] == [2 / len(plan)] * len(plan)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_hold_each_sample_once_with_global_denominators(cfg: PPOConfig, ranks: int) -> None:
    experience = collect(rollout())
    add_advantages(experience, cfg, 0.0)
    steps = [[0, 1, 2, 3], [4]]
    batches = step_batches(experience, steps, ranks, cfg, POLICY_COLUMNS, kl_coef=0.25)
    for number, members in enumerate(steps):
        parts = [batches[rank][number] for rank in range(ranks)]
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert all(part.denominators == parts[0].denominators for part in parts)
        assert parts[0].denominators.tokens == sum(experience.trajectories[i].response_length for i in members)
        assert parts[0].denominators.sequences == len(members)
        assert parts[0].kl_coef == 0.25 and parts[0].denominators.constant == 8
        seen = [int(i) for part in parts for batch in part.micro_batches for i in batch.sequence_index if i >= 0]
        assert sorted(seen) == list(range(len(members))) or sorted(seen) == members
        total = sum(float(b.columns["action_mask"].sum()) for part in parts for b in part.micro_batches)
        assert total == parts[0].denominators.tokens
        assert set(parts[0].micro_batches[0].columns) == {"action_mask", "advantages"}


def test_without_a_limit_of_responses_the_constant_of_the_loss_is_that_of_all_tokens(cfg: PPOConfig) -> None:
    experience = collect(rollout())
    add_advantages(experience, cfg, 0.0)
    ((step,),) = step_batches(experience, [range(5)], 1, replace(cfg, max_new_tokens=None), POLICY_COLUMNS, 0.0)
    assert step.denominators.constant == 16


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_travel_with_their_sequences(cfg: PPOConfig, ranks: int) -> None:
    groups = rollout()
    groups[1][0] = replace(groups[1][0], images=(PlacedImage(0, 1, b"a"), PlacedImage(1, 1, b"b")))
    groups[2][1] = replace(groups[2][1], images=(PlacedImage(1, 1, b"c"),))
    experience = collect(groups)
    add_advantages(experience, cfg, 0.0)
    samples = experience.trajectories
    steps = step_batches(experience, [[0, 1, 2, 3, 4]], ranks, cfg, POLICY_COLUMNS, 0.0)
    forward = forward_batches([t.token_ids for t in samples], ranks, cfg, [t.images for t in samples])
    for batches in ([b for rank in steps for step in rank for b in step.micro_batches], sum(forward, [])):
        found = set()
        for batch in batches:
            for place, length, data in batch.to("cpu").images:
                sequence = int((batch.cu_seqlens <= place).sum()) - 1
                own = samples[int(batch.sequence_index[sequence])]
                found.add(data)
                assert PlacedImage(place - int(batch.cu_seqlens[sequence]), length, data) in own.images
        assert found == {b"a", b"b", b"c"}


def test_experience_has_a_length() -> None:
    assert len(Experience(collect(rollout()).trajectories)) == 5
