"""A PPO run without Ray, DeepSpeed or vLLM: real episodes on a scripted engine, and a policy that notes its batches."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine

from openrlhf.algorithms.metrics import MetricSum
from openrlhf.cluster.group import PendingCall, WorkerError
from openrlhf.config import PPOConfig, build
from openrlhf.datasets.prompts import PromptRow
from openrlhf.platform import MemoryStats
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import FunctionReward, RewardClient
from openrlhf.trainer.console import Console
from openrlhf.trainer.metrics_log import MetricsLogger
from openrlhf.trainer.ppo import Inputs
from openrlhf.trainer.system import PPOSystem

TOK = LetterTokenizer()


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """1 where the label is in the response; a prompt with a z has no reward."""
    if "z" in "".join(prompts):
        raise ValueError("no")
    return [float(label in query[len(p) :]) for query, p, label in zip(queries, prompts, labels, strict=True)]


class Pool:
    """Stands for the engine pool: answers "b" to even seeds and "c" to odd ones, "bb" when greedy."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(self._reply, version=0)
        self.sampled: list[tuple[int, int]] = []

    def _reply(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        if sampling.temperature == 0:
            return [*TOK.encode("bb"), EOS]
        assert sampling.seed is not None
        self.sampled.append((prompt[0], sampling.seed))
        return [*TOK.encode("bc"[sampling.seed % 2]), EOS]

    def run_groups(
        self, prompts: Iterable[PromptItem], n: int, sampling: SamplingParams, timeout: float
    ) -> Iterator[Group]:
        client = RewardClient(FunctionReward(reward_func), on_failure="drop", batch_size=1)
        spec = EpisodeSpec(sampling=sampling, max_length=16, tokenizer=TOK, rewards=client)
        for prompt in reversed(list(prompts)):
            yield asyncio.run(run_group(prompt, n, self.engine, spec))

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def prompt_logprobs(self, ids: list[int]) -> list[list[float]]:
        return [[0.0] * len(ids)]


class Done(PendingCall):
    """A call that has its answers already."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__("scripted", {})
        self._answers = answers

    def _pick(self, answers: Any) -> list[Any]:
        return self._answers


class Policy:
    """Stands for the actor's group: remembers what it was called with."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.calls: list[str] = []
        self.timeouts: dict[str, float | None] = {}
        """Of each method's last call."""
        self.trained: list[Any] = []
        self.answers: dict[str, Any] = {
            "sync_weights": 0.0,
            "train": MetricSum(),
            "memory": MemoryStats(1, 1, 1, 1, 1, 1),
        }

    def __len__(self) -> int:
        return self.ranks

    def submit(self, method: str, *args: Any, per_rank: Any = None) -> Done:
        self.calls.append(method)
        answers = dict(self.answers)
        if method == "train":
            self.trained.append(per_rank)
        if method == "forward":
            return Done([[np.zeros(len(b.input_ids), dtype=np.float32) for b in own] for own in per_rank])
        if method == "probe":
            answers[method] = np.zeros(len(args[0]), dtype=np.float32)
        return Done([answers.get(method)] * self.ranks)

    def call(self, method: str, *args: Any, per_rank: Any = None, timeout: float | None = None) -> list[Any]:
        self.timeouts[method] = timeout
        return self.submit(method, *args, per_rank=per_rank).result(0)


def rows(*facts: tuple[str, str]) -> list[PromptRow]:
    """Prompts with the right answer "b", each with its data source."""
    return [PromptRow(i, text, TOK.encode(text), "b", source) for i, (text, source) in enumerate(facts)]


def config(folder: Path, **flags: Any) -> PPOConfig:
    """Two rollouts of two prompts with two samples each, one optimizer step a rollout."""
    data, reward = folder / "data.jsonl", folder / "reward.py"
    data.write_text('{"input": "1"}\n')
    reward.write_text("def reward_func(queries, prompts, labels): ...\n")
    values: dict[str, Any] = {
        "pretrain": str(folder), "prompt_data": str(data), "remote_rm_url": str(reward), "advantage_estimator": "remax",
        "n_samples_per_prompt": 2, "rollout_batch_size": 2, "train_batch_size": 4, "micro_train_batch_size": 2,
        "micro_rollout_batch_size": 2, "actor_num_gpus_per_node": 1, "max_new_tokens": 8, "max_len": 16,
        "init_kl_coef": 0.0, "eval_n_samples_per_prompt": 2, "ckpt_path": str(folder / "ckpt"),
    }  # fmt: skip
    cfg = build("train_ppo_ray", **(values | flags))
    assert isinstance(cfg, PPOConfig)
    return cfg


def trainer_arguments(cfg: PPOConfig, pool: Pool, policy: Policy, prompts: list[PromptRow]) -> tuple[Any, ...]:
    """What a PPOTrainer takes, with the prompts as the evaluation set too."""
    system = PPOSystem(cfg, None, pool, policy, None, None, None)  # type: ignore[arg-type]
    inputs = Inputs(prompts, prompts, [10, 11], None)
    return (cfg, system, inputs, MetricsLogger(cfg, cfg.run_folder), Console())


class Calls:
    """Stands for the groups in flight: episodes of the pool's engine, done one by one in a random order.

    Args:
        pool: whose engine answers.
        seconds: that each takes.
        fail_after: raise instead of giving back a group after so many; None never.
    """

    def __init__(self, pool: Pool, n: int, sampling: SamplingParams, seconds: float, fail_after: int | None) -> None:
        self._pool, self._n, self._sampling = pool, n, sampling
        self._seconds, self._left = seconds, fail_after
        self._running: list[PromptItem] = []
        self.has_room = True

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, prompt: PromptItem) -> None:
        self._running.append(prompt)

    def wait(self, seconds: float) -> list[Group]:
        if self._seconds > seconds:
            time.sleep(seconds)
            return []
        time.sleep(self._seconds)
        if self._left == 0:
            raise WorkerError("engine 0 died during run_group")
        self._left = None if self._left is None else self._left - 1
        chosen = self._running.pop(random.Random(len(self._pool.sampled)).randrange(len(self._running)))
        return list(self._pool.run_groups([chosen], self._n, self._sampling, 0.0))


class AsyncPool(Pool):
    """A pool for asynchronous runs; weight versions are those of the syncs.

    Args:
        seconds: that a group takes.
        fail_after: number of groups after which the engine is dead.
    """

    def __init__(self, seconds: float = 0.0, fail_after: int | None = None) -> None:
        super().__init__()
        self._seconds, self._fail_after = seconds, fail_after

    def group_calls(self, n: int, sampling: SamplingParams, timeout: float) -> Calls:
        return Calls(self, n, sampling, self._seconds, self._fail_after)
