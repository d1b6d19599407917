"""Seconds and memory of what the driver does in a step, by phase: no engines, no GPU, no Ray.

    python benchmarks/driver.py [--prompts 128 256] [--samples 16] [--mean_tokens 2000] [--max_tokens 16000]
        [--ranks 64] [--micro_tokens 32768] [--json FILE] [--profile PHASE]

Synthetic trajectories of random lengths go through the code that a run of train_ppo_ray sends them through: groups are
pickled as an engine does it and read as the driver does, filtered, collected, given advantages, packed for --ranks
ranks, and pickled for these; then metrics, dump, checkpoint of the buffer, and the queue of --async_train. Pickling is
Ray's own, protocol 5: what it puts in line is copied several times, what it leaves out of band once. Peaks are the
highest resident memory of a phase above that at its beginning (Linux). Every number of prompts is a case of its own:
where a phase's last column, its growth in the exponent of the number of tokens, is well above 1, it will be worse at
the size of a real run.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pickle
import pstats
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle

from openrlhf.config import PPOConfig, build
from openrlhf.datasets.prompts import PromptRow
from openrlhf.rollout.buffer import RolloutBuffer
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.filters import DynamicFilter, GroupCollector
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.metrics import extra_log_means
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.experience import (
    POLICY_COLUMNS,
    VALUE_COLUMNS,
    Experience,
    add_advantages,
    collect,
    forward_batches,
    optimizer_steps,
    sample_metrics,
    step_batches,
    token_outputs,
    with_model_scores,
)
from openrlhf.trainer.ppo_async import staleness_metrics
from openrlhf.trainer.ppo_async_queue import QueueLimits, RolloutQueue
from openrlhf.trainer.prompt_stream import PromptStream

PROMPT_TOKENS = 200
MIB = 2.0**20


@dataclass
class Pickled:
    """Objects as Ray would send them: the pickles, and the arrays that travel beside them."""

    pickles: list[bytes]
    buffers: list[list[bytes]]

    @classmethod
    def of(cls, objects: Sequence[Any]) -> Pickled:
        pickles, buffers = [], []
        for value in objects:
            own: list[pickle.PickleBuffer] = []
            pickles.append(cloudpickle.dumps(value, protocol=5, buffer_callback=own.append))
            buffers.append([bytes(buffer.raw()) for buffer in own])  # the copy into the object store
        return cls(pickles, buffers)

    def read(self) -> list[Any]:
        """The objects again; their arrays are read-only, as those in the object store."""
        return [pickle.loads(data, buffers=own) for data, own in zip(self.pickles, self.buffers, strict=True)]

    def __str__(self) -> str:
        inline = sum(map(len, self.pickles)) / MIB
        return f"{inline:.0f} MiB in line, {sum(len(b) for own in self.buffers for b in own) / MIB:.0f} out of band"


@dataclass
class Report:
    """Figures of the phases of one case."""

    profiled: str | None = None
    samples: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def phase(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a phase, and measure it; of several under one name the last counts."""
        gc.collect()
        before = _reset_peak()
        profile = cProfile.Profile() if self.profiled and self.profiled in name else None
        started = time.perf_counter()
        result = function(*arguments) if profile is None else profile.runcall(function, *arguments)
        self.seconds[name] = time.perf_counter() - started
        self.peak_mib[name] = _memory("VmHWM") - before
        if isinstance(result, Pickled):
            self.notes[name] = str(result)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        return result


def _memory(name: str) -> float:
    """A figure of this process's memory in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def _reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


@contextmanager
def configuration(options: argparse.Namespace, **flags: object) -> Iterator[PPOConfig]:
    """The flags of a run with a critic and a KL penalty in the reward: every column there is."""
    with tempfile.TemporaryDirectory() as folder:
        data, reward = Path(folder, "data.jsonl"), Path(folder, "reward.py")
        data.write_text('{"input": "1"}\n' * max(options.prompts))
        reward.write_text("def reward_func(queries, prompts, labels): ...\n")
        cfg = build(
            "train_ppo_ray",
            pretrain=folder,
            prompt_data=str(data),
            remote_rm_url=str(reward),
            n_samples_per_prompt=options.samples,
            rollout_batch_size=max(options.prompts),
            train_batch_size=max(options.prompts) * options.samples,
            use_dynamic_batch=True,
            packing_samples=True,
            train_max_tokens_per_gpu=options.micro_tokens,
            actor_num_gpus_per_node=options.ranks,
            max_new_tokens=options.max_tokens,
            max_len=options.max_tokens + PROMPT_TOKENS,
            **flags,
        )
        assert isinstance(cfg, PPOConfig)
        yield cfg


def prompts(count: int) -> list[PromptRow]:
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 150_000, (count, PROMPT_TOKENS)).tolist()
    return [PromptRow(i, "question " * PROMPT_TOKENS, own, str(i), "math") for i, own in enumerate(ids)]


def groups(items: Sequence[PromptItem], options: argparse.Namespace) -> list[Group]:
    """Finished groups: lengths of a log-normal distribution, with log-probs and a reward of 0 or 1."""
    generator = np.random.default_rng(1)
    return [
        Group(item, tuple(_sample(item, index, generator, options) for index in range(options.samples)))
        for item in items
    ]


def _sample(item: PromptItem, index: int, generator: np.random.Generator, options: argparse.Namespace) -> Trajectory:
    spread = 1.0
    tokens = int(generator.lognormal(math.log(options.mean_tokens) - spread**2 / 2, spread))
    tokens = min(max(tokens, 1), options.max_tokens)
    mask = np.arange(PROMPT_TOKENS + tokens) >= PROMPT_TOKENS
    response = generator.integers(0, 150_000, tokens)
    reward = float(index % 2)
    return Trajectory(
        prompt_id=item.prompt_id,
        group_id=item.group_id,
        sample_index=index,
        token_ids=np.concatenate([np.asarray(item.token_ids), response]),
        action_mask=mask,
        logprobs=np.where(mask, -generator.random(mask.size, np.float32), 0),
        weight_version=np.where(mask, 0, -1),
        reward=reward,
        score=reward,
        truncated=tokens == options.max_tokens,
        extra_logs={"format": 1.0, "correct": reward},
        metadata={"datasource": "math", "prompt": item.text, "label": item.label, "response": "word " * tokens},
        timings={"generation": 1.0},
        step_rewards=((PROMPT_TOKENS, 0.5),),
    )


def measure(count: int, options: argparse.Namespace) -> Report:
    """All phases of one step with ``count`` prompts."""
    report = Report(options.profile)
    sent = groups(PromptStream(prompts(count), seed=0, episodes=1).take(count), options)
    report.samples = count * options.samples
    report.tokens = sum(t.total_length for group in sent for t in group.trajectories)
    pickled = report.phase("engines: pickle groups", Pickled.of, sent)
    sent.clear()
    received = report.phase("read groups", pickled.read)
    gae = {"advantage_estimator": "gae", "kl_estimator": "k1", "gamma": 0.999, "lambd": 0.95, "init_kl_coef": 0.01}
    with configuration(options, critic_num_gpus_per_node=options.ranks, **gae) as cfg:
        experience = _rollout(report, received, cfg)
        batches = _forward(report, experience, cfg, options)
        report.phase("advantages: gae, KL in the reward", add_advantages, experience, cfg, 0.01)
        del batches  # the trainer holds them no longer
        _training(report, experience, cfg, options)
    with configuration(options, advantage_estimator="group_norm", init_kl_coef=0.0) as cfg:
        experience.columns.clear()
        report.phase("advantages: group_norm", add_advantages, experience, cfg, 0.0)
    _storage(report, received, experience)
    report.phase("queue of --async_train, two steps", asynchronous, received)
    return report


def _rollout(report: Report, received: list[Group], cfg: PPOConfig) -> Experience:
    def filtered() -> list[Group]:
        items = [group.item for group in received]
        collector = GroupCollector(len(items), lambda count: items[:count], DynamicFilter(), RolloutBuffer())
        assert list(collector) == items
        for group in received:
            collector.add(group)
        return list(collector.finish().groups)

    trajectories = [group.trajectories for group in report.phase("filter groups", filtered)]
    experience: Experience = report.phase("collect", collect, trajectories)
    report.phase("metrics", sample_metrics, experience.trajectories, cfg)
    report.phase("metrics: extra logs", extra_log_means, experience.trajectories)
    report.phase("metrics of --async_train", staleness_metrics, experience.trajectories, 1)
    scores = np.array([t.reward for t in experience.rewarded])
    report.phase("scores of a reward model", with_model_scores, experience.rewarded, scores)
    return experience


def _forward(report: Report, experience: Experience, cfg: PPOConfig, options: argparse.Namespace) -> Any:
    sequences = [t.token_ids for t in experience.trajectories]
    batches = report.phase("forward: plan and pack", forward_batches, sequences, options.ranks, cfg)
    pickled = report.phase("forward: pickle, for each model", Pickled.of, batches)
    report.phase("forward: read, in all workers", pickled.read)
    outputs = Pickled.of([[-np.ones(b.num_tokens, np.float32) for b in rank] for rank in batches]).read()
    for name in ("old_logprobs", "ref_logprobs", "old_values"):
        column = report.phase("forward: outputs of each model", token_outputs, batches, outputs, len(experience))
        experience.columns[name] = column
    return batches


def _training(report: Report, experience: Experience, cfg: PPOConfig, options: argparse.Namespace) -> None:
    ids = [t.group_id for t in experience.trajectories]
    plan = report.phase("optimizer steps", optimizer_steps, ids, cfg, (0, 0))
    for name, columns in (("actor", POLICY_COLUMNS), ("critic", VALUE_COLUMNS)):
        arguments = (experience, plan, options.ranks, cfg, columns, 0.0)
        steps = report.phase(f"train {name}: plan and pack", step_batches, *arguments)
        pickled = report.phase(f"train {name}: pickle", Pickled.of, steps)
        del steps
        report.phase(f"train {name}: read, in all workers", pickled.read)


def _storage(report: Report, received: list[Group], experience: Experience) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(RolloutDumpWriter(folder)) as writer:
        path = report.phase("dump, in a thread", writer.write, 1, experience.trajectories)
        report.notes["dump, in a thread"] = f"{path.stat().st_size / MIB:.0f} MiB"
    buffer = RolloutBuffer()

    def fill() -> None:
        for group in received:
            buffer.put(group)

    report.phase("buffer: put", fill)
    state = report.phase("buffer: state for a checkpoint", buffer.state_dict)
    report.phase("buffer: pickle", Pickled.of, [state])


def asynchronous(finished: Sequence[Group]) -> None:
    """Two steps of a queue that may be two steps ahead, and is asked for the next one after every group."""
    batch = len(finished)
    stream = PromptStream(prompts(batch), seed=0, episodes=10)
    queue = RolloutQueue(stream, RolloutBuffer(), None, QueueLimits(batch, queue_size=2, in_flight=2 * batch))
    queue.weights_changed(0)
    running: deque[PromptItem] = deque()
    version = 0
    while version < 2:
        while (item := queue.next_prompt()) is not None:
            running.append(item)
        item = running.popleft()
        queue.finished(Group(item, finished[item.group_id % batch].trajectories))
        if queue.ready:
            queue.take()
            version += 1
            queue.weights_changed(version)


def show(reports: Sequence[Report]) -> None:
    first, last = reports[0], reports[-1]
    for report in reports:
        print(f"{report.samples} samples, {report.tokens} tokens")
    print(f"{'phase':<36}" + "".join(f"{'s':>9}{'peak MiB':>10}" for _ in reports) + f"{'growth':>8}")
    for name in first.seconds:
        cells = "".join(f"{r.seconds[name]:>9.2f}{r.peak_mib[name]:>10.0f}" for r in reports)
        growth = ""
        if len(reports) > 1 and first.seconds[name] > 0.01:
            growth = f"{math.log(last.seconds[name] / first.seconds[name], last.tokens / first.tokens):.2f}"
        print(f"{name:<36}{cells}{growth:>8}  {last.notes.get(name, '')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 128], help="a case each")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--mean_tokens", type=int, default=2000, help="of a response")
    parser.add_argument("--max_tokens", type=int, default=16_000, help="of a response")
    parser.add_argument("--ranks", type=int, default=64, help="of actor, critic and reference")
    parser.add_argument("--micro_tokens", type=int, default=32_768, help="--train_max_tokens_per_gpu")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--profile", help="print where the time goes in the phases with this in their name")
    options = parser.parse_args()
    reports = [measure(count, options) for count in options.prompts]
    show(reports)
    if options.json:
        options.json.write_text(json.dumps([asdict(report) for report in reports]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
