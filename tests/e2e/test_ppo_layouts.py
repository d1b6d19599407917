"""The layout never changes the answer: ranks, ZeRO stages and engines, on real Ray, DeepSpeed and vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppo_helpers import ppo_arguments, write_prompts, write_reward

from openrlhf.algorithms.metrics import MetricSum
from openrlhf.cluster.group import WorkerGroup
from openrlhf.cluster.placement import Group as DeviceGroup
from openrlhf.cluster.placement import PlacementPlan, Role
from openrlhf.cluster.ray_cluster import Cluster, create_cluster, disconnect
from openrlhf.config import PPOConfig, parse_cli
from openrlhf.config.derive import data_parallel_size
from openrlhf.datasets.prompts import load_prompts
from openrlhf.engines.pool import EnginePool
from openrlhf.engines.weight_sync.compare import stored_weights
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.group import Group
from openrlhf.trainer.experience import (
    POLICY_COLUMNS,
    Experience,
    add_advantages,
    collect,
    forward_batches,
    optimizer_steps,
    step_batches,
    token_outputs,
)
from openrlhf.trainer.ppo import probe_ids
from openrlhf.trainer.prompt_stream import PromptStream
from openrlhf.trainer.sampling import training_sampling
from openrlhf.trainer.system import PPOSystem, WeightSync, start_system
from openrlhf.trainer.weight_check import WeightMismatchError, check_tensors, check_weights
from openrlhf.utils.tiny_model import make_tiny_model
from openrlhf.workers.model_worker import form_groups, start_group

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

START = 400.0


@dataclass
class Stack:
    """Two engines, an actor of one rank (ZeRO-0) and one of two ranks (ZeRO-3), and one rollout."""

    cfg: PPOConfig
    system: PPOSystem
    sharded: WorkerGroup
    sharded_cfg: PPOConfig
    groups: list[Group]
    probe: list[int]

    @property
    def engines(self) -> EnginePool:
        return self.system.engines


def _start_sharded(cfg: PPOConfig, log_dir: Path) -> tuple[WorkerGroup, Cluster]:
    plan = PlacementPlan((DeviceGroup((Role("actor", 2),)),), "CPU")
    cluster = create_cluster(plan, START)
    group = start_group("actor", cluster, str(log_dir), START)
    for call in form_groups([group], START):
        call.result(START)
    group.call("load", cfg, 10)
    return group, cluster


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("layouts")
    model = make_tiny_model(folder / "model", tie=True)
    arguments = ppo_arguments(
        model, write_prompts(folder / "prompts.jsonl"), folder / "out", reward=write_reward(folder / "reward.py")
    )
    cfg = parse_cli(
        "train_ppo_ray", [*arguments, "--vllm_num_engines", "2", "--zero_stage", "0", "--init_kl_coef", "0"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        system = start_system(cfg, actor_steps=10, critic_steps=10, log_dir=folder / "logs", report=print)
        sharded_cfg = replace(cfg, zero_stage=3, micro_train_batch_size=2, packing_samples=True)
        sharded, cluster = _start_sharded(sharded_cfg, folder / "sharded_logs")
        rows = load_prompts(cfg, load_tokenizer(model), max_tokens=32)
        sampling = replace(training_sampling(cfg), logprobs=True)
        prompts = PromptStream(rows, cfg.seed, 1).take(8)
        groups = list(system.engines.run_groups(prompts, 4, sampling, START))
        yield Stack(cfg, system, sharded, sharded_cfg, groups, probe_ids(rows, 40))
        sharded.kill()
        cluster.remove()
        system.close()
        disconnect()


def _experience(stack: Stack, group: WorkerGroup, cfg: PPOConfig) -> Experience:
    experience = collect([g.trajectories for g in stack.groups])
    sequences = [t.token_ids for t in experience.trajectories]
    batches = forward_batches(sequences, data_parallel_size(cfg, len(group)), cfg)
    outputs = group.call("forward", per_rank=batches)
    experience.columns["old_logprobs"] = token_outputs(batches, outputs, len(sequences))
    add_advantages(experience, cfg, 0.0)
    return experience


def _train(experience: Experience, group: WorkerGroup, cfg: PPOConfig) -> list[dict[str, float]]:
    """Metrics of each optimizer step."""
    plan = optimizer_steps([t.group_id for t in experience.trajectories], replace(cfg, max_epochs=2), seed=(1,))
    figures = []
    for step in plan:
        batches = step_batches(experience, [step], data_parallel_size(cfg, len(group)), cfg, POLICY_COLUMNS, 0.0)
        figures.append(MetricSum.merged(group.call("train", per_rank=batches)).values())
    return figures


def test_every_prompt_was_sampled_by_one_of_two_engines(stack: Stack) -> None:
    assert sorted(group.item.group_id for group in stack.groups) == list(range(8))
    for group in stack.groups:
        assert [t.sample_index for t in group.trajectories] == [0, 1, 2, 3]
        for trajectory in group.trajectories:
            assert list(trajectory.token_ids[: len(group.item.token_ids)]) == list(group.item.token_ids)
            assert trajectory.response_length >= 1
            assert trajectory.reward is not None
            assert trajectory.metadata["label"] == group.item.label


def test_samples_depend_on_their_seed_not_on_the_engine(stack: Stack) -> None:
    # In the other order the engines get other prompts; every sample must be the same.
    items = sorted((group.item for group in stack.groups), key=lambda item: -item.group_id)
    sampling = replace(training_sampling(stack.cfg), logprobs=True)
    again = {g.item.group_id: g for g in stack.engines.run_groups(items, 4, sampling, START)}
    for group in stack.groups:
        for first, second in zip(group.trajectories, again[group.item.group_id].trajectories, strict=True):
            assert np.array_equal(first.token_ids, second.token_ids)


def test_greedy_baselines_and_stop_strings(stack: Stack) -> None:
    items = [replace(group.item, greedy_baseline=True) for group in stack.groups[:4]]
    sampling = replace(training_sampling(stack.cfg), stop=("1",), min_p=0.01)
    first, again = (
        {g.item.group_id: g for g in stack.engines.run_groups(order, 4, sampling, START)}
        for order in (items, items[::-1])
    )
    ends = []
    for number, group in first.items():
        greedy, other = group.baseline, again[number].baseline
        assert greedy is not None and other is not None and greedy.reward is not None
        assert greedy.token_ids.tolist() == other.token_ids.tolist() and greedy.sample_index == 4
        for t in (*group.trajectories, greedy):
            text = t.metadata["response"]
            assert "1" not in text[:-1]
            assert t.truncated == (not text.endswith(("1", "<eos>")))
            ends.append(text.endswith("1"))
    assert any(ends)


def test_a_weight_update_interrupts_running_samples_and_changes_none_of_them(stack: Stack) -> None:
    """The same weights again, as another version: what goes on over them must be what it would have been."""
    cfg = stack.cfg
    sampling = replace(training_sampling(cfg), logprobs=True, max_tokens=40, ignore_eos=True)
    items = [group.item for group in stack.groups]
    stack.system.sync_weights(stack.probe, 3)
    whole = {g.item.group_id: g for g in stack.engines.run_groups(items, 4, sampling, START)}
    mixed = 0
    # The samples take a tenth of a second or two: on a busy machine all may be done before an update, or none begun.
    for version in range(4, 44, 2):
        calls = stack.engines.group_calls(4, sampling, START)
        for item in items:
            calls.submit(item)
        for update in (version, version + 1):
            time.sleep(0.02)
            stack.system.sync_weights(stack.probe, update)
        interrupted: list[Group] = []
        while len(calls):
            interrupted += calls.wait(START)
        assert len(interrupted) == len(items)
        for group in interrupted:
            for one, other in zip(group.trajectories, whole[group.item.group_id].trajectories, strict=True):
                assert set(other.weight_version[other.action_mask]) == {3}
                versions = one.weight_version[one.action_mask]
                assert (np.diff(versions) >= 0).all() and set(versions) <= {version - 1, version, version + 1}
                mixed += len(set(versions)) > 1
                assert np.array_equal(one.token_ids, other.token_ids)
                assert one.logprobs is not None and other.logprobs is not None
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        if mixed >= 8:
            break
    assert mixed >= 8


def test_engine_and_trainer_agree_before_training(stack: Stack) -> None:
    for group, cfg in ((stack.system.actor, stack.cfg), (stack.sharded, stack.sharded_cfg)):
        experience = _experience(stack, group, cfg)
        for t, old in zip(experience.trajectories, experience.columns["old_logprobs"], strict=True):
            assert t.logprobs is not None
            difference = np.abs(old.numpy() - t.logprobs)[t.action_mask]
            assert difference.max() <= 1e-5


def test_ranks_and_zero_stages_give_the_same_losses_and_syncs_bring_them_to_both_engines(
    stack: Stack, tmp_path: Path
) -> None:
    plain = _train(_experience(stack, stack.system.actor, stack.cfg), stack.system.actor, stack.cfg)
    sharded = _train(_experience(stack, stack.sharded, stack.sharded_cfg), stack.sharded, stack.sharded_cfg)
    assert len(plain) == len(sharded) == 4
    for one, other in zip(plain, sharded, strict=True):
        assert one.keys() == other.keys()
        for name in ("policy_loss", "actor_grad_norm", "ppo_kl", "ppo_clip_ratio", "actor_lr"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    assert any(abs(step["policy_loss"]) > 1e-3 for step in plain)
    ends = [group.call("probe", stack.probe)[0] for group in (stack.system.actor, stack.sharded)]
    assert np.abs(ends[0] - ends[1]).max() <= 1e-5

    check = partial(check_weights, stack.cfg, stack.engines, stack.probe)
    with pytest.raises(WeightMismatchError, match="does not hold the trainer's weights"):
        check(WeightSync({}, stack.system.actor.call("probe", stack.probe)[0], None))  # the sync is left out
    with pytest.raises(WeightMismatchError, match=r"(?s)engine 0 \(worker 0\).*qkv_proj.weight \(packed\)"):
        check_tensors(stack.system.compare_weights())
    sync = stack.system.sync_weights(stack.probe, 1)
    assert sync.timings["transfer"] < 60
    assert check(sync)["sync/logprob_diff_max"] <= 1e-5

    # ZeRO-3 with two ranks sends the same weights.
    _train(_experience(stack, stack.sharded, stack.sharded_cfg), stack.sharded, stack.sharded_cfg)
    stack.sharded.call("connect_engines", stack.engines.group, "gloo", 1, stack.engines.group.timeout)
    with pytest.raises(WeightMismatchError):
        check(WeightSync({}, stack.sharded.call("probe", stack.probe)[0], None))
    sharded = replace(stack.system, actor=stack.sharded, cfg=replace(stack.cfg, check_weight_sync=True))
    for _ in range(2):
        figures = check(sharded.sync_weights(stack.probe, 1))
        assert figures["sync/logprob_diff_max"] <= 1e-5
        assert figures["sync/differing_elements"] == 0 and figures["sync/compared_tensors"] > 20

    # Both ranks write them, file by file in turns.
    written = []
    for name, bucket_bytes in (("one", 1 << 30), ("many", 1 << 14)):
        (tmp_path / name).mkdir()
        stack.sharded.call("write_weights", str(tmp_path / name), bucket_bytes)
        written.append(dict(stored_weights(tmp_path / name)))
    assert len(list((tmp_path / "one").iterdir())) == 1 and len(list((tmp_path / "many").iterdir())) > 4
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_ranks_that_share_sequences_give_the_same_losses(stack: Stack) -> None:
    """The two sharded ranks from the start again: with samples of their own, and with the same ones."""
    stack.sharded.call("load", stack.sharded_cfg, 10)
    apart = _train(_experience(stack, stack.sharded, stack.sharded_cfg), stack.sharded, stack.sharded_cfg)
    cfg = replace(stack.sharded_cfg, ring_attn_size=2)
    stack.sharded.call("load", cfg, 10)
    group = WorkerGroup("actor", stack.sharded.members, START, data_copies=2)
    with pytest.raises(ValueError, match="2 per-rank arguments for 2 actor ranks, of which 2 share each"):
        group.submit("train", per_rank=[[], []])
    together = _train(_experience(stack, group, cfg), group, cfg)
    assert len(apart) == len(together) == 4
    for one, other in zip(apart, together, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_nan_in_an_advantage_stops_the_step_and_leaves_the_weights(stack: Stack) -> None:
    before = stack.system.actor.call("probe", stack.probe)[0]
    experience = _experience(stack, stack.system.actor, stack.cfg)
    experience.columns["advantages"][3][-1] = float("nan")
    with pytest.raises(Exception, match="not finite|NaN or infinite"):
        _train(experience, stack.system.actor, stack.cfg)
    after: Any = stack.system.actor.call("probe", stack.probe)[0]
    assert np.array_equal(before, after)
