"""Dumps of a run, the same training from its dump, and runs that only write rollouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_run import Policy, Pool, config, rows, trainer_arguments

from openrlhf.config import PPOConfig
from openrlhf.datasets.prompts import PromptRow
from openrlhf.rollout.dump import DumpError, RolloutDumpWriter, read_rollout_dump
from openrlhf.trainer.ppo import PPOTrainer
from openrlhf.trainer.replay import ReplayTrainer, RolloutOnlyTrainer, dumped_groups, replayed_files, replayed_steps
from openrlhf.trainer.sampling import training_sampling

PROMPTS = rows(("d", "one"), ("e", "one"), ("f", "one"))


def finish(make: Callable[..., PPOTrainer], cfg: PPOConfig, pool: Any, policy: Policy, *, files: Any = ()) -> None:
    """Run a trainer to its end, with the dump on the disk."""
    prompts: list[PromptRow] = PROMPTS
    arguments = trainer_arguments(cfg, pool, policy, prompts)
    if not cfg.dump_rollouts:
        make(*files, *arguments).fit()
        return
    with closing(RolloutDumpWriter(cfg.dump_rollouts)) as dump:
        make(*files, *arguments, dump=dump).fit()


def lines(cfg: PPOConfig, kind: str) -> list[dict[str, Any]]:
    records = map(json.loads, (Path(cfg.run_folder) / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == kind]


def names(folder: str | None) -> list[str]:
    assert folder is not None
    return sorted(path.name for path in Path(folder).iterdir())


def test_training_from_a_dump_sees_the_same_batches(tmp_path: Path) -> None:
    dump = str(tmp_path / "dump")
    first = config(tmp_path, dump_rollouts=dump, eval_steps=2, ckpt_path=str(tmp_path / "a"))
    policy = Policy()
    finish(PPOTrainer, first, Pool(), policy)
    assert names(dump) == [f"{kind}_step_0000000{n}.jsonl" for kind, n in (("eval", 2), ("rollout", 1), ("rollout", 2))]
    samples, baselines = read_rollout_dump(Path(dump) / "rollout_step_00000001.jsonl")
    assert len(samples) == 4 and [t.reward for t in baselines] == [1.0, 1.0]
    assert len(read_rollout_dump(Path(dump) / "eval_step_00000002.jsonl")[0]) == 6

    second = config(tmp_path, load_rollouts=dump, ckpt_path=str(tmp_path / "b"))
    again, files = Policy(), replayed_files(second)
    finish(ReplayTrainer, second, Pool(), again, files=[files])
    assert [c for c in again.calls if c != "memory"] == ["train", "train", "save_hf"]  # no weights travel
    assert len(policy.trained) == len(again.trained) == 2
    for one, other in zip(policy.trained, again.trained, strict=True):
        assert len(one) == len(other) == 1 and len(one[0]) == len(other[0])
        for step, repeated in zip(one[0], other[0], strict=True):
            assert step.denominators == repeated.denominators
            for batch, copy in zip(step.micro_batches, repeated.micro_batches, strict=True):
                assert torch.equal(batch.input_ids, copy.input_ids)
                assert set(batch.columns) == set(copy.columns) == {"action_mask", "advantages"}
                assert all(torch.equal(batch.columns[name], copy.columns[name]) for name in batch.columns)
    for before, after in zip(lines(first, "train"), lines(second, "train"), strict=True):
        for name in ("step", "reward", "response_length", "rollout/greedy_reward_mean", "rollout/num_samples"):
            assert before[name] == after[name], name
    assert replayed_steps(second, files) == 2  # the second rollout has one prompt only
    assert replayed_files(config(tmp_path, load_rollouts=dump, max_steps=1)) == files[:1]


@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_dump_with_other_numbers_of_samples_takes_the_whole_schedule(tmp_path: Path, n: int) -> None:
    dump = str(tmp_path / "dump")
    first = config(tmp_path, dump_rollouts=dump, n_samples_per_prompt=n, train_batch_size=2 * n)
    finish(PPOTrainer, first, Pool(), Policy())
    cfg, policy = config(tmp_path, load_rollouts=dump, ckpt_path=str(tmp_path / "b")), Policy()
    files = replayed_files(cfg)
    finish(ReplayTrainer, cfg, Pool(), policy, files=[files])
    progress = [step.progress for (steps,) in policy.trained for step in steps]
    assert sum(progress) == replayed_steps(cfg, files) == 2
    assert len(progress) == {1: 2, 2: 2, 6: 5}[n]  # of 12 and 6 samples, 4 at a time


def test_rollout_only_writes_and_trains_nothing(tmp_path: Path) -> None:
    cfg = config(tmp_path, rollout_only=True, dump_rollouts=str(tmp_path / "dump"), eval_before_train=True, max_steps=1)
    policy = Policy(ranks=0)
    finish(RolloutOnlyTrainer, cfg, Pool(), policy)
    assert policy.calls == []
    assert names(cfg.dump_rollouts) == ["eval_step_00000000.jsonl", "rollout_step_00000001.jsonl"]
    assert lines(cfg, "train")[0]["rollout/num_samples"] == 4
    (evaluation,) = lines(cfg, "eval")
    assert evaluation["eval_num_samples"] == 6 and 0 < evaluation["eval_one_pass1"] < 1  # odd seeds answer wrongly
    groups = dumped_groups(tmp_path / "dump" / "rollout_step_00000001.jsonl")
    items = {prompt.prompt_id: prompt for prompt in PROMPTS}
    assert len(groups) == 2
    for group in groups:
        row = items[group.item.prompt_id]
        assert (group.item.text, list(group.item.token_ids), group.item.label) == (row.text, row.token_ids, "b")
        assert group.baseline is not None and group.baseline.group_id == group.item.group_id


def test_dumps_that_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="has no files rollout_step"):
        replayed_files(config(tmp_path, load_rollouts=str(tmp_path)))
    empty = tmp_path / "rollout_step_00000001.jsonl"
    empty.write_text("")
    with pytest.raises(DumpError, match="rollout_step_00000001.jsonl has no samples"):
        dumped_groups(empty)


def test_sampling_flags_reach_the_engine(tmp_path: Path) -> None:
    cfg = config(tmp_path, min_p=0.05, stop_strings=["\\n\\n", "[END]"], stop_token_ids=[3, 4], top_k=7)
    sampling = training_sampling(cfg)
    assert (sampling.min_p, sampling.stop, sampling.stop_token_ids) == (0.05, ("\\n\\n", "[END]"), (3, 4))
    pool = Pool()
    finish(PPOTrainer, config(tmp_path, min_p=0.05, stop_strings=["x"], eval_before_train=True), pool, Policy())
    used = [(s.min_p, s.stop) for s in pool.engine.sampling if s.temperature > 0]
    assert set(used) == {(0.05, ("x",))} and len(used) == 6 + 6  # evaluation and training
