"""All rollout engines as one: groups of samples go to the least loaded engine, control calls go to all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from openrlhf.cluster.group import Member, PendingCall, WorkerError, WorkerGroup
from openrlhf.cluster.ray_cluster import Cluster
from openrlhf.config import PPOConfig
from openrlhf.engines.spec import engine_spec
from openrlhf.engines.vllm_engine import VLLMEngineActor
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.utils import interrupts

if TYPE_CHECKING:
    from openrlhf.engines.weight_sync.compare import Comparison

SAMPLES_IN_FLIGHT = 1024
"""Samples one engine is given before others wait at the driver: enough to fill it, few enough to balance engines."""

ANSWER_SECONDS = 1260.0
"""Longer than an episode may take, the driver waits for a group: its engine ends late episodes itself, and may then ask
a group's reward and its filter, which have 600 s each."""


class GroupCalls:
    """Groups in flight: each prompt goes to the least loaded engine.

    Args:
        group: the engines.
        samples_per_prompt: episodes of each prompt.
        sampling: options of every episode.
        timeout: seconds that an episode may take; a group gets :data:`ANSWER_SECONDS` more.
    """

    def __init__(self, group: WorkerGroup, samples_per_prompt: int, sampling: SamplingParams, timeout: float) -> None:
        self._group = group
        self._samples = samples_per_prompt
        self._sampling = sampling
        self._timeout = timeout
        self._room = max(1, SAMPLES_IN_FLIGHT // samples_per_prompt)
        self._load = [0] * len(group)
        self._running: dict[ray.ObjectRef, tuple[int, PromptItem, float]] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """An engine can be given another prompt."""
        return min(self._load) < self._room

    def submit(self, prompt: PromptItem) -> None:
        index = self._load.index(min(self._load))
        call = self._group.members[index].handle.run_group.remote(prompt, self._samples, self._sampling)
        self._running[call] = (index, prompt, time.monotonic() + self._timeout + ANSWER_SECONDS)
        self._load[index] += 1

    def wait(self, seconds: float) -> list[Group]:
        """The groups that finish next; empty when none does within ``seconds``.

        Raises:
            WorkerError: an engine failed or died, or the time of prompts is over; names these.
        """
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=seconds)
        if done:  # all that are, so that none of them counts as late
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        groups = []
        for call in done:
            index, _, _ = self._running.pop(call)
            self._load[index] -= 1
            groups.extend(PendingCall("run_group", {call: self._group.members[index]}).result(timeout=0.0))
        now = time.monotonic()
        late = [(index, prompt.prompt_id) for index, prompt, deadline in self._running.values() if deadline < now]
        if late:
            prompts = sorted(prompt for _, prompt in late)
            engines = [self._group.members[index] for index in sorted({index for index, _ in late})]
            shown = ", ".join(map(str, prompts[:10])) + (" ..." if len(prompts) > 10 else "")
            raise WorkerError(
                f"{len(prompts)} prompts were not done {ANSWER_SECONDS:g} s after {self._timeout:g} s "
                f"(--rollout_timeout) in {', '.join(engine.name for engine in engines)}; prompt ids {shown}. Is a "
                f"reward or an agent stuck?\n{engines[0].log_excerpt()}"
            )
        return groups


class EnginePool:
    """The engines of a run.

    Args:
        group: the engine actors.
        workers_per_engine: GPUs (tensor-parallel ranks) of each.
    """

    def __init__(self, group: WorkerGroup, workers_per_engine: int) -> None:
        self.group = group
        self.workers_per_engine = workers_per_engine

    def load(self, cfg: PPOConfig) -> PendingCall:
        """Start loading the model, and what rollouts need, in every engine; wait for the result elsewhere."""
        return self.group.submit("start", cfg)

    def run_groups(
        self, prompts: Iterable[PromptItem], samples_per_prompt: int, sampling: SamplingParams, timeout: float
    ) -> Iterator[Group]:
        """Run the episodes of many prompts, yielding each prompt's group when it is done.

        Args:
            prompts: taken one by one as engines have room; asked again after every finished group.
            samples_per_prompt: episodes of each.
            sampling: options of every episode; each gets a seed of its own from run, epoch, prompt and sample.
            timeout: seconds that each episode may take.

        Raises:
            WorkerError: an engine failed or died, or time ran out; names the prompts that were not done.
        """
        source = iter(prompts)
        calls = self.group_calls(samples_per_prompt, sampling, timeout)
        while True:
            # Asked again after every finished group: filtering may have made more prompts necessary.
            while calls.has_room and (prompt := next(source, None)) is not None:
                calls.submit(prompt)
            if not len(calls):
                return
            yield from calls.wait(interrupts.POLL_SECONDS)
            interrupts.check()

    def group_calls(self, samples_per_prompt: int, sampling: SamplingParams, timeout: float) -> GroupCalls:
        """Groups of a rollout, to be submitted and waited for one by one; see :meth:`run_groups`."""
        return GroupCalls(self.group, samples_per_prompt, sampling, timeout)

    def prompt_logprobs(self, token_ids: list[int]) -> list[list[float]]:
        """Each engine's log-probs of a text (temperature 1)."""
        return self.group.call("prompt_logprobs", token_ids)

    def sleep(self) -> None:
        self.group.call("sleep")

    def wake(self, tags: list[str]) -> None:
        self.group.call("wake", tags)

    def pop_metrics(self) -> dict[str, float]:
        """Reward counts (summed) and latencies (mean over all calls, or largest) since the last call.

        Also the host memory of the largest engine.
        """
        parts: list[dict[str, float]] = self.group.call("pop_metrics")
        return {name: _combine(name, [part for part in parts if name in part]) for part in parts for name in part}

    def compare_weights(self, folder: str) -> list[list[Comparison]]:
        """Each worker of each engine compares what it holds with the weights in a folder."""
        return self.group.call("compare_weights", folder)

    def shutdown(self) -> None:
        """Stop the engines' processes in order."""
        self.group.call("shutdown", timeout=30.0)


def _combine(name: str, parts: list[dict[str, float]]) -> float:
    values = [part[name] for part in parts]
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_mean"):
        return float(np.average(values, weights=[part["reward/calls"] for part in parts]))
    return sum(values)


def start_engines(cfg: PPOConfig, cluster: Cluster, *, device_type: str, transport: str, log_dir: str) -> EnginePool:
    """Start the engine actors in their bundles; :meth:`EnginePool.load` then loads the model."""
    members: list[Member] = []
    for index in range(cfg.vllm_num_engines):
        log_file = os.path.join(log_dir, f"engine-{index}.log")
        spec = engine_spec(cfg, index, device_type=device_type, weight_transport=transport, log_file=log_file)
        options: dict[str, Any] = cluster.actor_options("engine", index)
        handle = VLLMEngineActor.options(max_concurrency=10_000, **options).remote(
            spec, cluster.visible_devices("engine", index)
        )
        members.append(Member(f"engine {index}", handle, log_file))
    return EnginePool(WorkerGroup("engine", members, cfg.rollout_timeout), cfg.vllm_tensor_parallel_size)
