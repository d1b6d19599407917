"""The loop of train_ppo_ray without Ray or a model: what it does at the ends of episodes, and with checkpoints."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_run
from scripted_run import Policy, Pool, config, rows, trainer_arguments

from openrlhf.algorithms.metrics import STEP, MetricSum
from openrlhf.cluster.group import WorkerError
from openrlhf.config import PPOConfig
from openrlhf.datasets.order import epoch_permutation
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.trainer.ppo import PPOTrainer
from openrlhf.trainer.ppo_async import AsyncPPOTrainer
from openrlhf.trainer.ppo_checkpoint import PPOCheckpoints
from openrlhf.trainer.ppo_run import _check_best_metric
from openrlhf.utils.errors import ExplainedError
from openrlhf.workers.checkpoint_files import CheckpointError, checkpoint_tags, finish_checkpoint, rotate_checkpoints
from openrlhf.workers.checkpoint_files import writing_tag as scratch_tag


def trained(cfg: PPOConfig, without_reward: int) -> tuple[PPOTrainer, Policy]:
    """A run over five prompts of which the one in this place of the first episode has no reward."""
    place = epoch_permutation(5, cfg.seed, 0).tolist()[without_reward]
    policy = Policy()
    prompts = rows(*(("z" if index == place else "q", "") for index in range(5)))
    trainer = PPOTrainer(*trainer_arguments(cfg, Pool(), policy, prompts))
    trainer.fit()
    return trainer, policy


@pytest.mark.parametrize(("episodes", "steps"), [(1, 2), (2, 5)])
def test_the_end_of_an_episode_without_anything_to_learn_is_passed_over(
    tmp_path: Path, episodes: int, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five prompts, two a rollout: the fifth is alone, and its samples have no reward."""
    cfg = config(tmp_path, num_episodes=episodes)
    trainer, policy = trained(cfg, without_reward=4)
    assert trainer.global_step == steps and len(policy.trained) == steps
    assert policy.calls.count("sync_weights") == steps + 2  # at the start and after the end of the first episode
    assert policy.calls[-1] == "save_hf"
    assert "The last 1 groups of the episode are left out" in capsys.readouterr().out


def test_a_run_that_has_nothing_to_learn_from_the_start_is_an_error(tmp_path: Path) -> None:
    cfg = config(tmp_path, num_episodes=2)
    trainer = PPOTrainer(*trainer_arguments(cfg, Pool(), Policy(), rows(("z", ""))))
    with pytest.raises(NoLearnableGroups, match="the data ran out"):
        trainer.fit()


class OneByOne(Pool):
    """Asks for prompts as long as there are any, as the engines do."""

    def run_groups(self, prompts: Iterable[PromptItem], *arguments: Any) -> Iterator[Group]:
        waiting = iter(prompts)
        while (prompt := next(waiting, None)) is not None:
            yield from super().run_groups([prompt], *arguments)


class Solved(Policy):
    """After the first step every answer is right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def submit(self, method: str, *args: Any, per_rank: Any = None) -> Any:
        if method == "train":
            self._monkeypatch.setattr(
                scripted_run, "reward_func", lambda queries, prompts, labels: [1.0] * len(queries)
            )
        return super().submit(method, *args, per_rank=per_rank)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_ends_when_too_many_groups_in_a_row_are_dropped_over_steps_and_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Seven prompts, four a step and ten rounds: forty, which no step and no episode has."""
    filtering = {"dynamic_filtering": True, "advantage_estimator": "rloo", "num_episodes": 200}
    sizes = {"rollout_batch_size": 4, "train_batch_size": 16, "n_samples_per_prompt": 4, "async_train": asynchronous}
    cfg, policy = config(tmp_path, **filtering, **sizes), Solved(monkeypatch)
    pool = scripted_run.AsyncPool() if asynchronous else OneByOne()
    trainer = (AsyncPPOTrainer if asynchronous else PPOTrainer)(
        *trainer_arguments(cfg, pool, policy, rows(*[("q", "")] * 7))
    )
    words = r"the last (\d+) were dropped one after another \(kept 0, seen \1; dropped: mean_high"
    with pytest.raises(NoLearnableGroups, match=words) as told:
        trainer.fit()
    dropped = int(re.findall(r"the last (\d+)", str(told.value))[0])
    assert 40 <= dropped < 40 + cfg.rollout_batch_size
    assert trainer.global_step >= 1 and policy.calls[-1] == "save_hf", "what was learned is saved"


def test_extra_logs_replace_no_metric_and_do_not_steer_the_kl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
        return {
            "rewards": [0.5] * len(queries),
            "extra_logs": {"kl": 30, "reward": 7, "sync/logprob_diff_max": 2, "a": 4},
        }

    monkeypatch.setattr(scripted_run, "reward_func", reward_func)
    flags = {"init_kl_coef": 0.1, "kl_target": 0.05, "kl_horizon": 100, "advantage_estimator": "reinforce"}
    cfg, policy = config(tmp_path, use_kl_loss=True, max_steps=1, **flags), Policy()
    policy.answers["train"] = MetricSum()
    policy.answers["train"].add("kl", 0.05, 1.0, STEP)
    trainer = PPOTrainer(*trainer_arguments(cfg, Pool(), policy, rows(("q", ""), ("q", ""))))
    trainer.fit()
    assert trainer.kl.value == 0.1
    line = json.loads((Path(cfg.run_folder) / "metrics.jsonl").read_text().splitlines()[0])
    expected = {"kl": 0.05, "reward": 0.5, "sync/logprob_diff_max": 0.0, "a": 4.0}
    clashes = {"extra/kl": 30.0, "extra/reward": 7.0, "extra/sync/logprob_diff_max": 2.0}
    assert {name: line[name] for name in expected | clashes} == expected | clashes


class Saves(Policy):
    """Writes checkpoints, but dies at one."""

    def __init__(self, dies_at: str = "") -> None:
        super().__init__()
        self.dies_at = dies_at
        self.loaded: list[str] = []

    def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        if method == "save_checkpoint":
            folder, tag, keep, limit = args
            if tag == self.dies_at:
                raise WorkerError(f"killed at {tag}")
            (Path(folder) / scratch_tag(tag)).mkdir(parents=True)
            finish_checkpoint(folder, tag, {})
            if keep is not None:
                rotate_checkpoints(folder, keep, limit)
        if method == "save_hf":
            Path(args[0]).mkdir()
        if method == "load_checkpoint":
            self.loaded.append(args[1])
            return [{"global_step": int(args[1][len("global_step") :])}]
        return super().call(method, *args, **options)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_run_killed_between_critic_and_actor_resumes_from_what_both_have(tmp_path: Path, keep: int) -> None:
    cfg = config(tmp_path, max_ckpt_num=keep)
    system = PPOTrainer(*trainer_arguments(cfg, Pool(), Saves("global_step6"), rows(("q", "")))).system
    actor, critic = system.actor, Saves()
    system.critic = critic  # type: ignore[assignment]
    checkpoints = PPOCheckpoints(cfg, system)
    for step in range(1, 6):
        checkpoints.save(step, {})
    with pytest.raises(WorkerError, match="killed at global_step6"):
        checkpoints.save(6, {})
    root = Path(cfg.ckpt_path)
    assert checkpoint_tags(root / "_actor") == [f"global_step{step}" for step in range(6 - keep, 6)]
    assert set(checkpoint_tags(root / "_actor")) < set(checkpoint_tags(root / "_critic"))

    assert checkpoints.load() == {"global_step": 5}
    assert actor.loaded == critic.loaded == ["global_step5"]  # type: ignore[attr-defined]
    actor.dies_at = ""  # type: ignore[attr-defined]
    checkpoints.save(6, {})
    assert checkpoint_tags(root / "_actor") == checkpoint_tags(root / "_critic")
    assert len(checkpoint_tags(root / "_critic")) == keep

    for tag in checkpoint_tags(root / "_critic"):
        (root / "_critic" / tag).rename(root / "_critic" / f"{tag}0")
    (root / "_critic" / "latest").write_text("global_step60")
    with pytest.raises(CheckpointError, match="global_step6 of the actor, but global_step60 of the critic"):
        checkpoints.load()


def test_all_hugging_face_copies_are_kept(tmp_path: Path) -> None:
    cfg = config(tmp_path, max_ckpt_num=1, save_hf_ckpt=True)
    system = PPOTrainer(*trainer_arguments(cfg, Pool(), Saves(), rows(("q", "")))).system
    checkpoints = PPOCheckpoints(cfg, system)
    root = Path(cfg.ckpt_path)
    root.mkdir(parents=True, exist_ok=True)
    for step in (1, 2):
        checkpoints.save(step, {})
        checkpoints.save_best(step, {})
    tags = [f"{best}global_step{step}" for best in ("", "best_") for step in (1, 2)]
    assert {path.name for path in root.glob("*_hf")} == {f"{tag}_hf" for tag in tags}
    assert set(checkpoint_tags(root / "_actor")) == {"global_step2", "best_global_step2"}


def test_another_metric_is_not_compared_with_the_old_one(tmp_path: Path) -> None:
    cfg = config(tmp_path, save_steps=1, best_metric_key="eval_b_pass1")
    checkpoints = PPOTrainer(*trainer_arguments(cfg, Pool(), Saves(), rows(("q", "")))).checkpoints
    checkpoints._best_key, checkpoints._best_value = "eval_response_length_mean", 512.0
    assert checkpoints.improves({"eval_b_pass1": 0.9})
    assert not checkpoints.improves({"eval_b_pass1": 0.8}) and checkpoints.improves({"eval_b_pass1": 0.95})


def test_a_best_checkpoint_sends_no_weights_to_engines_that_keep_theirs(tmp_path: Path) -> None:
    cfg, policy = config(tmp_path, eval_steps=1, best_metric_key=""), Policy()
    trainer = PPOTrainer(*trainer_arguments(cfg, Pool(), policy, rows(*[("q", "")] * 4)))
    trainer.fit()
    assert policy.calls.count("save_checkpoint") == 1, "the first; the second is as good"
    assert policy.calls.count("sync_weights") == 3 == trainer.global_step + 1


def test_the_best_checkpoint_needs_no_regular_ones(tmp_path: Path) -> None:
    def improves(**flags: Any) -> bool:
        cfg = config(tmp_path, save_steps=-1, **flags)
        checkpoints = PPOTrainer(*trainer_arguments(cfg, Pool(), Saves(), rows(("q", "")))).checkpoints
        return checkpoints.improves({"eval_b_pass1": 0.5, "eval_num_samples": 2.0})

    assert improves() and improves(best_metric_key="eval_b_pass1")
    assert not improves(best_metric_key="none") and not improves(disable_ds_ckpt=True)
    assert improves(disable_ds_ckpt=True, save_hf_ckpt=True)


def test_a_metric_that_the_evaluation_will_not_have_is_refused_at_the_start(tmp_path: Path) -> None:
    def check(key: str) -> None:
        cfg = config(tmp_path, best_metric_key=key, eval_n_samples_per_prompt=2)
        _check_best_metric(cfg, rows(("q", ""), ("p", "")))

    for key in ("", "none", "eval_default_pass2", "eval_default_mean2_ci95", "eval_truncated_rate"):
        check(key)
    with pytest.raises(ExplainedError, match="eval_default_pas1 is none of .* eval_default_pass1, "):
        check("eval_default_pas1")
    _check_best_metric(config(tmp_path, best_metric_key="x"), [])


@pytest.mark.parametrize(("target", "expected"), [(None, 0.001), (0.1, 0.05)])
def test_a_resumed_run_takes_the_weight_of_the_kl_from_the_flag_unless_it_adapts(
    tmp_path: Path, target: float | None, expected: float
) -> None:
    flags = {"init_kl_coef": 0.001, "kl_target": target, "advantage_estimator": "reinforce", "load_checkpoint": True}
    cfg = config(tmp_path, **{name: value for name, value in flags.items() if value is not None})
    trainer = PPOTrainer(*trainer_arguments(cfg, Pool(), Policy(), rows(("q", ""))))
    state = {**trainer._client_state(), "kl_coef": 0.05, "global_step": 3}
    trainer.checkpoints.load = lambda: state  # type: ignore[method-assign]
    trainer._resume()
    assert (trainer.kl.value, trainer.global_step) == (expected, 3)


class Noting(Policy):
    """Keeps what each rank was given."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(ranks)
        self.given: dict[str, Any] = {}

    def submit(self, method: str, *args: Any, per_rank: Any = None) -> Any:
        self.given[method] = per_rank
        return super().submit(method, *args, per_rank=per_rank)


def test_groups_that_wait_are_in_a_checkpoint_once(tmp_path: Path) -> None:
    """They may be gigabytes, and with ZeRO-3 every rank writes what it is given."""
    cfg, actor = config(tmp_path), Noting(ranks=4)
    system = PPOTrainer(*trainer_arguments(cfg, Pool(), actor, rows(("q", "")))).system
    critic = Noting(ranks=2)
    system.critic = critic  # type: ignore[assignment]
    PPOCheckpoints(cfg, system).save(1, {"buffer": "groups"})
    assert actor.given["save_checkpoint"] == [{"buffer": "groups"}, {}, {}, {}]
    assert critic.given["save_checkpoint"] == [{"buffer": "groups"}, {}]


def test_a_rollout_is_let_go_before_the_next_one(tmp_path: Path) -> None:
    class Watching(Pool):
        def __init__(self) -> None:
            super().__init__()
            self.known: list[weakref.ref[Any]] = []
            self.alive: list[int] = []

        def run_groups(self, *arguments: Any) -> Any:
            self.alive.append(sum(known() is not None for known in self.known))
            for group in super().run_groups(*arguments):
                self.known.extend(map(weakref.ref, group.trajectories))
                yield group
                del group

    pool = Watching()
    PPOTrainer(*trainer_arguments(config(tmp_path), pool, Policy(), rows(*[("q", "")] * 6))).fit()
    assert pool.alive == [0, 0, 0] and len(pool.known) == 12


def test_models_on_as_many_ranks_get_the_same_micro_batches(tmp_path: Path) -> None:
    cfg = config(tmp_path, advantage_estimator="gae", init_kl_coef=0.01)
    pool, actor, ref, critic = Pool(), Noting(2), Noting(2), Noting(1)
    trainer = PPOTrainer(*trainer_arguments(cfg, pool, actor, rows(("q", ""), ("r", ""))))
    trainer.system.ref, trainer.system.critic = ref, critic  # type: ignore[assignment]
    prompts = trainer.stream.take(2)
    experience = trainer._collect(list(pool.run_groups(prompts, 2, trainer.sampling, 1.0)))
    trainer._add_model_columns(experience, 1)
    assert actor.given["forward"] is ref.given["forward"] and len(critic.given["forward"]) == 1
    assert set(experience.columns) == {"old_logprobs", "ref_logprobs", "old_values"}
