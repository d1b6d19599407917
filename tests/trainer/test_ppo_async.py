"""Asynchronous runs on a scripted engine: overlap, order, failures on both sides, checkpoints."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scripted_run
from scripted_run import AsyncPool, Policy, Pool, config, rows, trainer_arguments

from openrlhf.cluster.group import WorkerError
from openrlhf.config import PPOConfig
from openrlhf.engines import pool as engine_pool
from openrlhf.rollout.errors import RolloutTimeout
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.trainer.ppo import PPOTrainer
from openrlhf.trainer.ppo_async import AsyncPPOTrainer, staleness_metrics
from openrlhf.utils import interrupts

PROMPTS = rows(*((letter, "one") for letter in "defghi"))


@pytest.fixture(autouse=True)
def _no_failure_is_left() -> Iterator[None]:
    with interrupts.handled():
        yield
    assert not [t for t in threading.enumerate() if t.name == "rollouts"]


class Learner(Policy):
    """A policy that gives the pool's engine its version, and whose training may take time or fail.

    Args:
        seconds: that a step takes.
        until: told the number of a step, from 0 on; the step ends before its time when this holds.
        fail_at: number of the step that fails.
    """

    def __init__(
        self,
        pool: AsyncPool,
        seconds: float = 0.0,
        fail_at: int | None = None,
        until: Callable[[int], bool] = lambda step: False,
    ) -> None:
        super().__init__()
        self._pool, self._seconds, self._fail_at, self._until = pool, seconds, fail_at, until
        self.checkpoints: list[dict[str, Any]] = []
        self.versions: list[int] = []
        self.sampled: list[int] = []
        """Number of samples that there were at the end of each step's training."""

    def submit(self, method: str, *args: Any, per_rank: Any = None) -> Any:
        if method == "sync_weights":
            self._pool.engine.version = args[0]
            self.versions.append(args[0])
        if method == "save_checkpoint":
            self.checkpoints.append(per_rank[0])
        if method == "train":
            if self._fail_at == len(self.trained):
                raise WorkerError("train failed in actor 0: loss is NaN")
            deadline = time.monotonic() + self._seconds
            while time.monotonic() < deadline and not self._until(len(self.trained)):  # as PendingCall waits
                time.sleep(0.01)
                interrupts.check()
            self.sampled.append(len(self._pool.sampled))
        return super().submit(method, *args, per_rank=per_rank)


class KeepingPool(AsyncPool):
    """A pool whose engine does not finish one prompt.

    Args:
        number: of that prompt, in the order in which they are started, from 0 on.
    """

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__(seconds)
        self.number = number
        self.kept = threading.Event()
        """Set when the prompt runs."""

    def group_calls(self, n: int, sampling: SamplingParams, timeout: float) -> KeepingCalls:
        return KeepingCalls(self, n, sampling, self._seconds, None)


class KeepingCalls(scripted_run.Calls):
    _pool: KeepingPool
    _started = 0

    def submit(self, prompt: PromptItem) -> None:
        super().submit(prompt)
        if self._started == self._pool.number:
            self._running.pop()
            self._pool.kept.set()
        self._started += 1

    def __len__(self) -> int:
        return len(self._running) + self._pool.kept.is_set()

    def wait(self, seconds: float) -> list[Group]:
        if self._running:
            return super().wait(seconds)
        time.sleep(seconds)
        return []


def configured(folder: Path, **flags: Any) -> PPOConfig:
    values = {"async_train": True, "advantage_estimator": "group_norm", "ckpt_path": str(folder / "ckpt")}
    return config(folder, **(values | flags))


def metrics(cfg: PPOConfig) -> list[dict[str, Any]]:
    records = map(json.loads, (Path(cfg.run_folder) / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def trained(policy: Policy) -> list[list[int]]:
    """First tokens of the prompts of each step's samples."""
    return [sorted(int(ids) for ids in _prompts(steps)) for steps in policy.trained]


def _prompts(per_rank: Any) -> list[int]:
    batches = [batch for rank in per_rank for step in rank for batch in step.micro_batches]
    return [int(batch.input_ids[start]) for batch in batches for start in batch.cu_seqlens[:-1]]


def run(make: Any, cfg: PPOConfig, pool: Pool, policy: Policy) -> Any:
    trainer = make(*trainer_arguments(cfg, pool, policy, PROMPTS))
    trainer.fit()
    return trainer


@pytest.mark.parametrize("partial", [False, True])
def test_every_prompt_is_trained_once_an_episode_with_evaluations_in_between(tmp_path: Path, partial: bool) -> None:
    flags = {"partial_rollout": partial, "async_queue_size": 2, "eval_steps": 2, "best_metric_key": "none"}
    cfg = configured(tmp_path, num_episodes=2, **flags)
    pool = AsyncPool(seconds=0.002)
    policy = Learner(pool)
    run(AsyncPPOTrainer, cfg, pool, policy)
    firsts = [row.token_ids[0] for row in PROMPTS]
    steps = trained(policy)
    assert len(steps) == 6
    for episode in (steps[:3], steps[3:]):
        assert sorted(sum(episode, [])) == sorted(firsts * 2)
    assert policy.versions == list(range(7))
    figures = metrics(cfg)
    assert [m["step"] for m in figures] == list(range(1, 7))
    assert all(m["rollout/staleness_max"] <= 2 and m["rollout/stale_groups"] == 0 for m in figures)
    assert {m["rollout/lost_samples"] for m in figures} == {0}
    assert figures[-1]["rollout/groups_waiting"] == figures[-1]["rollout/groups_in_flight"] == 0


def test_groups_that_are_dropped_behind_the_last_step_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their counts are in no step's metrics."""
    pool = AsyncPool()
    policy = Learner(pool)

    class Calls(scripted_run.Calls):
        """The prompt without a reward is done when all others are trained on."""

        def wait(self, seconds: float) -> list[Group]:
            others = [prompt for prompt in self._running if "z" not in prompt.text]
            if not others and len(policy.trained) < 2:
                time.sleep(0.01)
                return []
            chosen = (others or self._running)[0]
            self._running.remove(chosen)
            return list(self._pool.run_groups([chosen], self._n, self._sampling, 0.0))

    pool.group_calls = lambda n, sampling, timeout: Calls(pool, n, sampling, 0.0, None)  # type: ignore[method-assign]
    cfg = configured(tmp_path, async_queue_size=2, vllm_generate_batch_size=8, partial_rollout=True)
    AsyncPPOTrainer(*trainer_arguments(cfg, pool, policy, rows(*((letter, "one") for letter in "zdefg")))).fit()
    assert [m["rollout/groups_seen"] for m in metrics(cfg)] == [m["rollout/groups_kept"] for m in metrics(cfg)]
    assert len(policy.trained) == 2
    assert "The last 1 groups of the episode are left out: no_samples 1" in capsys.readouterr().out


def test_with_a_queue_of_one_and_draining_a_run_repeats_itself(tmp_path: Path) -> None:
    runs = []
    for name, seconds in (("a", 0.0), ("b", 0.004)):
        cfg = configured(tmp_path, ckpt_path=str(tmp_path / name), num_episodes=2)
        pool = AsyncPool(seconds)
        policy = Learner(pool)
        run(AsyncPPOTrainer, cfg, pool, policy)
        ages = [(m["rollout/staleness_mean"], m["reward"]) for m in metrics(cfg)]
        runs.append((trained(policy), ages))
    assert runs[0] == runs[1]
    assert [age for age, _ in runs[0][1]] == [0, 1, 1, 1, 1, 1]
    sync = Policy()
    cfg = configured(tmp_path, async_train=False, ckpt_path=str(tmp_path / "sync"), num_episodes=2)
    run(PPOTrainer, cfg, Pool(), sync)
    assert trained(sync) == runs[0][0]


def test_generation_goes_on_while_the_policy_trains(tmp_path: Path) -> None:
    """A step's training ends when the samples of the next step are there; the last has no next one."""
    pool = AsyncPool(seconds=0.01)
    policy = Learner(pool, 60.0, until=lambda step: len(pool.sampled) >= min(4 * (step + 2), 12))
    started = time.monotonic()
    run(AsyncPPOTrainer, configured(tmp_path), pool, policy)
    seconds = time.monotonic() - started
    assert policy.sampled == [8, 12, 12]
    # What is generated meanwhile takes no time of the loop's.
    assert 0 < sum(m["timing/step_total"] for m in metrics(configured(tmp_path))) <= seconds < 60


def test_a_failing_engine_ends_the_training_at_once_with_its_error(tmp_path: Path) -> None:
    pool = AsyncPool(seconds=0.01, fail_after=3)
    started = time.monotonic()
    with pytest.raises(WorkerError, match="engine 0 died during run_group"):
        run(AsyncPPOTrainer, configured(tmp_path), pool, Learner(pool, seconds=60.0))
    assert time.monotonic() - started < 10


def test_a_failing_engine_ends_the_wait_for_its_groups(tmp_path: Path) -> None:
    pool = AsyncPool(fail_after=1)
    with pytest.raises(WorkerError, match="engine 0 died during run_group"):
        run(AsyncPPOTrainer, configured(tmp_path), pool, Learner(pool))


def test_a_failing_trainer_ends_the_generation(tmp_path: Path) -> None:
    pool = AsyncPool(seconds=0.01)
    with pytest.raises(WorkerError, match="loss is NaN"):
        run(AsyncPPOTrainer, configured(tmp_path, num_episodes=50), pool, Learner(pool, fail_at=2))
    count = len(pool.sampled)
    time.sleep(0.1)
    assert len(pool.sampled) == count


@pytest.mark.parametrize("flags", [{}, {"partial_rollout": True}])
def test_an_engine_that_answers_nothing_is_given_up(
    tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "ANSWER_SECONDS", 0.0)

    class Silent(AsyncPool):
        def group_calls(self, n: int, sampling: SamplingParams, timeout: float) -> scripted_run.Calls:
            self.calls = super().group_calls(n, sampling, timeout)
            return self.calls

        def prompt_logprobs(self, ids: list[int]) -> list[list[float]]:
            """Between the first weights and the wait for groups: the prompts run when that begins."""
            deadline = time.monotonic() + 60
            while len(self.calls) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            return super().prompt_logprobs(ids)

    pool = Silent(seconds=1e9)
    with pytest.raises(RolloutTimeout, match=r"waited for the groups of the next step.*0.5 s.* 2 prompts are running"):
        run(AsyncPPOTrainer, configured(tmp_path, rollout_timeout=0.5, **flags), pool, Learner(pool))


def test_a_drain_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "ANSWER_SECONDS", 0.0)
    cfg = configured(tmp_path, rollout_timeout=0.3)
    trainer = AsyncPPOTrainer(*trainer_arguments(cfg, AsyncPool(seconds=1e9), Policy(), PROMPTS))
    try:
        with trainer.rollouts.holding(0, drain=True):
            pass
        time.sleep(0.1)
        with (
            pytest.raises(RolloutTimeout, match="waited for the running groups, before a weight update"),
            trainer.rollouts.holding(1, drain=True),
        ):
            pass
    finally:
        trainer.rollouts.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_killed_run_that_goes_on_trains_every_prompt_once_an_episode(tmp_path: Path, asynchronous: bool) -> None:
    """Killed in step 2 to 6, with groups in flight and waiting, and resumed from the checkpoint of the step before.

    A group of the step behind the one that fails is not done before.
    """
    flags = {"num_episodes": 2, "partial_rollout": True, "async_queue_size": 2, "save_steps": 1}
    firsts = sorted([row.token_ids[0] for row in PROMPTS] * 2)
    for done in range(1, 6):
        pool = KeepingPool(2 * done + 2, seconds=0.005)
        last = done == 5  # no step is left behind the one that fails

        def trained_long_enough(step: int, pool: KeepingPool = pool, done: int = done, last: bool = last) -> bool:
            return last or step < done - 1 or pool.kept.is_set()

        first = Learner(pool, 60.0, done, until=trained_long_enough)
        with pytest.raises(WorkerError, match="loss is NaN"):
            killed = configured(tmp_path, ckpt_path=str(tmp_path / f"killed{done}"), **flags)
            run(AsyncPPOTrainer, killed, pool, first)
        state = first.checkpoints[-1]
        assert len(state["data_loader_state_dict"]["returned"]) >= (not last)
        modes = flags if asynchronous else {"num_episodes": 2, "async_train": False}
        again = configured(tmp_path, ckpt_path=str(tmp_path / f"again{done}"), **modes)
        pool = AsyncPool()
        policy = Learner(pool)
        make = AsyncPPOTrainer if asynchronous else PPOTrainer
        trainer = make(*trainer_arguments(again, pool, policy, PROMPTS))
        trainer.cfg.load_checkpoint = True
        trainer.checkpoints.load = lambda state=state: state
        trainer.fit()
        steps = [*trained(first), *trained(policy)]
        assert len(first.checkpoints) == policy.versions[0] == done and len(steps) == 6
        assert sorted(sum(steps[:3], [])) == sorted(sum(steps[3:], [])) == firsts
        if asynchronous:  # every group is counted once, also those that were done when the checkpoint was made
            assert sum(m["rollout/groups_seen"] for m in [*metrics(killed), *metrics(again)]) == 12


def test_staleness_is_counted_by_tokens() -> None:
    class Sample:
        def __init__(self, *versions: int) -> None:
            self.weight_version = np.array([-1, *versions])
            self.action_mask = self.weight_version >= 0

    samples: Any = [Sample(3, 3, 4), Sample(5), Sample()]
    assert staleness_metrics(samples, 5) == {
        "rollout/staleness_mean": 5 / 4,
        "rollout/staleness_max": 2.0,
        "rollout/mixed_version_rate": 1 / 3,
    }
    assert staleness_metrics([Sample()], 5) == {}  # type: ignore[list-item]
