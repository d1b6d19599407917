"""The PPO loop: prompts, rollout, experience, update, weight sync, evaluation, checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from openrlhf.algorithms.advantages import ADVANTAGE_ESTIMATORS
from openrlhf.algorithms.correction import effective_sample_size
from openrlhf.algorithms.kl import KLController
from openrlhf.algorithms.metrics import MetricSum
from openrlhf.cluster.group import PendingCall, WorkerGroup
from openrlhf.config import PPOConfig
from openrlhf.config.derive import data_parallel_size, derive, frozen_rollouts
from openrlhf.datasets.prompts import PromptRow
from openrlhf.rollout.buffer import RolloutBuffer, oldest_first
from openrlhf.rollout.dump import RolloutDumpWriter
from openrlhf.rollout.errors import NoLearnableGroups
from openrlhf.rollout.filters import (
    CollectedGroups,
    CustomFilter,
    DropLimit,
    DynamicFilter,
    GroupCollector,
    GroupJudge,
    GroupTally,
)
from openrlhf.rollout.group import Group
from openrlhf.rollout.hooks import BufferFilter
from openrlhf.rollout.metrics import extra_log_means
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.console import Console
from openrlhf.trainer.evaluation import evaluate
from openrlhf.trainer.experience import (
    POLICY_COLUMNS,
    VALUE_COLUMNS,
    Experience,
    add_advantages,
    collect,
    forward_batches,
    optimizer_steps,
    sample_metrics,
    sequence_outputs,
    step_batches,
    token_outputs,
)
from openrlhf.trainer.metrics_log import MetricsLogger
from openrlhf.trainer.ppo_checkpoint import PPOCheckpoints
from openrlhf.trainer.prompt_stream import PromptStream
from openrlhf.trainer.reward_inputs import RewardInputs
from openrlhf.trainer.sampling import training_sampling
from openrlhf.trainer.system import PPOSystem
from openrlhf.trainer.weight_check import check_weights
from openrlhf.utils import interrupts
from openrlhf.workers.checkpoint_files import nothing_to_resume
from openrlhf.workers.messages import CUTS

SUMMARY = ("reward", "response_length", "kl", "policy_loss", "critic_loss")
"""Figures of the line that each step prints, where they exist."""


@dataclass(frozen=True)
class Inputs:
    """Everything read from files before a process is started.

    Attributes:
        rows: the prompt set.
        eval_rows: the evaluation prompts, empty for none.
        probe: a short text as token ids, scored by trainer and engines after each weight sync.
        reward: what a reward model reads; None without one.
    """

    rows: Sequence[PromptRow]
    eval_rows: Sequence[PromptRow]
    probe: list[int]
    reward: RewardInputs | None


class PPOTrainer:
    """Runs PPO-family training on started processes.

    Args:
        cfg: a validated configuration.
        system: engines and model workers, models loaded.
        inputs: prompts and what else was read.
        logger: gets the metrics.
        console: gets what a person reads.
        dump: gets every rollout and evaluation; None for none.
    """

    def __init__(
        self,
        cfg: PPOConfig,
        system: PPOSystem,
        inputs: Inputs,
        logger: MetricsLogger,
        console: Console,
        dump: RolloutDumpWriter | None = None,
    ) -> None:
        self.cfg = cfg
        self.system = system
        self.logger = logger
        self.console = console
        self.inputs = inputs
        greedy = ADVANTAGE_ESTIMATORS.get(cfg.advantage_estimator).needs_baseline
        self.stream = PromptStream(inputs.rows, cfg.seed, cfg.num_episodes, greedy)
        self.buffer = RolloutBuffer()
        self.kl = KLController(cfg.init_kl_coef, cfg.kl_target, cfg.kl_horizon)
        self.sampling = training_sampling(cfg)
        self.dump = dump
        self.checkpoints = PPOCheckpoints(cfg, system)
        self.total_rollouts = derive(cfg, len(inputs.rows)).num_rollouts
        self.global_step = 0
        self._filter: GroupJudge | None = None
        if cfg.dynamic_sampling_filter_path:
            self._filter = CustomFilter(cfg.dynamic_sampling_filter_path)
        elif cfg.dynamic_filtering:
            self._filter = DynamicFilter(*cfg.dynamic_filtering_reward_range)
        self._drops = DropLimit(cfg.rollout_batch_size * cfg.dynamic_filtering_max_rounds)
        self._select = BufferFilter(cfg.buffer_filter_path, cfg) if cfg.buffer_filter_path else None

    # --- the loop --------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train until the prompts of all episodes are used, or ``max_steps`` is reached; then save.

        Raises:
            NoLearnableGroups: nothing is left to learn from; what was learned before is saved.
        """
        try:
            self._train()
        except NoLearnableGroups:
            if self.global_step:  # a policy that solves every prompt is not to be lost
                with interrupts.cleaning_up():
                    self._save_final()
            raise
        self._save_final()

    def _train(self) -> None:
        if self.cfg.load_checkpoint:
            self._resume()
        self._sync_weights()
        if self.cfg.eval_before_train:
            self._evaluate()
        while not self._finished():
            self.console.new_step()
            collected = self._roll_out()
            if not collected.groups:
                self._tell_left_out(collected.tally)
                if self.cfg.async_train or not collected.tally.seen:  # a queue is empty when all is done
                    break
                self.system.wake_models()
                self._sync_weights()
                continue
            metrics = {**collected.metrics(), **self.system.engines.pop_metrics()}
            if self._select is not None:
                metrics["rollout/buffer_filter_failures"] = float(self._select.pop_failures())
            if lost := collected.tally.lost.total():
                self.console.say(f"{lost} samples were lost, the last: {collected.tally.last_loss}")
            metrics.update(self._train_on(collected.groups))
            self.global_step += 1
            extra_logs = extra_log_means([t for group in collected.groups for t in group.trajectories])
            del collected  # it would be held, in Ray's store too, until the next rollout has replaced it
            self._after_update(metrics, extra_logs)

    def _tell_left_out(self, tally: GroupTally) -> None:
        """The last prompts of an episode may leave nothing to learn from."""
        if tally.seen:
            reasons = ", ".join(f"{name} {number}" for name, number in sorted(tally.dropped.items()))
            self.console.say(f"The last {tally.seen} groups of the episode are left out: {reasons}")

    def _last_step_done(self) -> bool:
        return 0 < self.cfg.max_steps <= self.global_step

    def _finished(self) -> bool:
        return self._last_step_done() or (self.stream.remaining <= 0 and len(self.buffer) == 0)

    def _after_update(self, metrics: dict[str, float], extra_logs: dict[str, float]) -> None:
        """Sync, log, checkpoint and evaluate, in the order that leaves nothing behind when one of them fails."""
        due = self.cfg.save_steps > 0 and self.global_step % self.cfg.save_steps == 0
        if due:
            with self.console.phase("checkpoint"):
                self.checkpoints.save(self.global_step, self._client_state())
        metrics.update(self._sync_weights())
        metrics.update(self.system.host_memory())
        seconds = self.console.seconds
        metrics.update(
            {
                "timing/generation": seconds.get("generate", 0.0),
                "timing/make_experience": seconds.get("experience", 0.0),
                "timing/ppo_train": seconds.get("train", 0.0),
                "timing/broadcast": seconds.get("weight sync", 0.0),
                "timing/step_total": sum(seconds.values()),
            }
        )
        self.logger.log("train", self.global_step, metrics, extra_logs)
        figures = {name: metrics[name] for name in SUMMARY if name in metrics}
        self.console.step_line(self.global_step, self.total_rollouts, figures)
        if metrics.get(CUTS, 0.0) > 0:
            self.console.say(
                "  micro-batches did not fit into GPU memory and were cut; the actor's log says what to turn"
            )
        if self.cfg.eval_steps > 0 and self.global_step % self.cfg.eval_steps == 0:
            self._evaluate()

    def _sync_weights(self) -> dict[str, float]:
        """Give the engines the actor's weights, and make sure that they have them; metrics of both."""
        with self.console.phase("weight sync"):
            with self._weights_may_change():
                sync = self.system.sync_weights(self.inputs.probe, self.global_step)
            timings = {f"timing/sync_{part}": seconds for part, seconds in sync.timings.items()}
            return {**timings, **check_weights(self.cfg, self.system.engines, self.inputs.probe, sync)}

    def _weights_may_change(self) -> AbstractContextManager[None]:
        """Around a transfer of weights; here nothing is generated meanwhile."""
        return nullcontext()

    def _evaluate(self) -> None:
        engines, rows = self.system.engines, self.inputs.eval_rows
        metrics = evaluate(self.cfg, engines, rows, self.console, self.dump, self.global_step)
        if not metrics:
            return
        self.logger.log("eval", self.global_step, metrics)
        if self.checkpoints.improves(metrics):
            self.system.prepare_save()
            self.checkpoints.save_best(self.global_step, self._client_state())
            if self.cfg.vllm_enable_sleep or self.cfg.deepspeed_enable_sleep:  # models and engines take turns
                self._sync_weights()

    # --- rollout ---------------------------------------------------------------------------------------------------

    def _roll_out(self) -> CollectedGroups:
        cfg = self.cfg
        collector = GroupCollector(
            cfg.rollout_batch_size,
            self.stream.take,
            self._filter,
            self.buffer,
            first_draw=cfg.vllm_generate_batch_size or 0,
            max_rounds=cfg.dynamic_filtering_max_rounds if self._filter is not None else 1,
            select=self._select or oldest_first,
            drops=self._drops,
        )
        with self.console.phase("generate", cfg.rollout_batch_size) as one_done, self.system.generating():
            for group in self.system.engines.run_groups(
                collector, cfg.n_samples_per_prompt, self.sampling, cfg.rollout_timeout
            ):
                collector.add(group)
                one_done()
        return collector.finish(may_be_empty=self.global_step > 0)

    # --- update ----------------------------------------------------------------------------------------------------

    def _train_on(self, groups: Sequence[Group]) -> dict[str, float]:
        """Experience and optimizer steps on finished groups; the step's metrics."""
        cfg = self.cfg
        experience = self._collect(groups)
        memory = self.system.memory.figures("generation")
        with self.console.phase("experience"):
            self.system.wake_models()
            plan = optimizer_steps(
                [t.group_id for t in experience.trajectories], cfg, seed=(cfg.seed, self.global_step)
            )
            experience = self._scored(experience)
            self._dump(experience)
            self._add_model_columns(experience, len(plan))
            figures = add_advantages(experience, cfg, self.kl.value)
        memory |= self.system.memory.figures("experience")
        with self.console.phase("train"):
            metrics = self._optimize(experience, plan)
        metrics |= memory | self.system.memory.figures("train")
        metrics |= self._sample_figures(experience.trajectories) | figures
        self._show_sample(experience.trajectories[0])
        kl = metrics.get("kl")
        metrics["kl_coef"] = self.kl.value
        if kl is not None:
            self.kl.update(kl, len(experience))
        return metrics

    @staticmethod
    def _collect(groups: Sequence[Group]) -> Experience:
        baselines = [group.baseline for group in groups if group.baseline is not None]
        return collect([group.trajectories for group in groups], baselines)

    def _dump(self, experience: Experience) -> None:
        if self.dump is not None:
            self.dump.submit(self.global_step + 1, experience.trajectories, experience.baselines)

    def _scored(self, experience: Experience) -> Experience:
        """With a reward model: its scores as rewards."""
        group = self.system.reward
        if group is None:
            return experience
        assert self.inputs.reward is not None
        sequences = self.inputs.reward(experience.rewarded)
        batches = forward_batches(sequences, data_parallel_size(self.cfg, len(group)), self.cfg)
        scores = sequence_outputs(batches, group.call("forward", per_rank=batches), len(sequences))
        return experience.with_scores(scores)

    def _add_model_columns(self, experience: Experience, num_steps: int) -> None:
        """Log-probs of policy and reference and values, where the algorithm uses them.

        Old log-probs are left out when the rollout feeds a single optimizer step and no KL is in the reward: they
        would equal the new ones.
        """
        system, cfg = self.system, self.cfg
        wanted: dict[str, WorkerGroup] = {}
        if system.ref is not None:
            wanted["ref_logprobs"] = system.ref
        if num_steps > 1 or (system.ref is not None and not cfg.use_kl_loss):
            wanted["old_logprobs"] = system.actor
        if system.critic is not None:
            wanted["old_values"] = system.critic
        sequences = [t.token_ids for t in experience.trajectories]
        images = [t.images for t in experience.trajectories]
        ranks = {name: data_parallel_size(cfg, len(group)) for name, group in wanted.items()}
        batches = {count: forward_batches(sequences, count, cfg, images) for count in set(ranks.values())}
        calls = [group.submit("forward", per_rank=batches[ranks[name]]) for name, group in wanted.items()]
        for name, outputs in zip(wanted, PendingCall.results(calls, cfg.rollout_timeout), strict=True):
            experience.columns[name] = token_outputs(batches[ranks[name]], outputs, len(experience))

    def _optimize(self, experience: Experience, plan: Sequence[Sequence[int]]) -> dict[str, float]:
        """Policy and critic updates, side by side where they have devices of their own."""
        system, cfg = self.system, self.cfg

        def submit(group: WorkerGroup, columns: Sequence[str], kl_coef: float) -> PendingCall:
            ranks = data_parallel_size(cfg, len(group))
            return group.submit("train", per_rank=step_batches(experience, plan, ranks, cfg, columns, kl_coef))

        calls = []
        if self.global_step >= frozen_rollouts(cfg):
            kl_coef = self.kl.value if cfg.use_kl_loss and system.ref is not None else 0.0
            calls.append(submit(system.actor, POLICY_COLUMNS, kl_coef))
        if system.critic is not None:
            calls.append(submit(system.critic, VALUE_COLUMNS, 0.0))
        answers = PendingCall.results(calls, cfg.rollout_timeout)
        parts: list[MetricSum] = list(itertools.chain.from_iterable(answers))
        return _with_effective_sample_size(MetricSum.merged(parts).values())

    def _sample_figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of the samples, before anything is computed from them."""
        return sample_metrics(trajectories, self.cfg)

    def _show_sample(self, trajectory: Trajectory) -> None:
        """One sample of the rollout, for TensorBoard and W&B."""
        text = str(trajectory.metadata.get("prompt", "")) + str(trajectory.metadata.get("response", ""))
        self.logger.log_text(self.global_step + 1, text, float(trajectory.reward or 0.0))

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _client_state(self) -> dict[str, Any]:
        return {
            "episode": self.stream.episode,
            "global_step": self.global_step,
            "total_consumed_prompts": self.stream.consumed,
            "data_loader_state_dict": self.stream.state_dict(),
            "buffer": self.buffer.state_dict(),
            "kl_coef": self.kl.value,
            **self.checkpoints.best_state(),
        }

    def _resume(self) -> None:
        state = self.checkpoints.load()
        if state is None:
            self.console.say(nothing_to_resume(self.cfg.ckpt_path))
            return
        self._load_client_state(state)
        self.console.say(
            f"Resumed after step {self.global_step} ({self.stream.consumed} prompts used, {len(self.buffer)} groups "
            "waiting)"
        )

    def _load_client_state(self, state: Mapping[str, Any]) -> None:
        self.stream.load_state_dict(state["data_loader_state_dict"])
        self.buffer.load_state_dict(state["buffer"])
        if self.cfg.kl_target is not None:  # else the flag's value holds, also where it was changed
            self.kl.value = state["kl_coef"]
        self.global_step = state["global_step"]

    def _save_final(self) -> None:
        with self.console.phase("save"):
            self.system.prepare_save()
            self.checkpoints.save_final()
        self.console.say(f"Saved the policy to {self.cfg.save_path}")


def _with_effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """The share of tokens that the importance weights leave effective, in the place of their mean square."""
    mean_square = metrics.pop("is_ratio_sq", None)
    if mean_square is not None:
        metrics["effective_sample_size"] = effective_sample_size(metrics["is_ratio"], mean_square)
    return metrics


def probe_ids(rows: Sequence[PromptRow], limit: int) -> list[int]:
    """A fixed text of at most ``limit`` and at least two tokens, made of the first prompts."""
    ids: list[int] = []
    for row in itertools.cycle(rows):
        ids.extend(row.token_ids)
        if len(ids) >= limit:
            break
    return ids[:limit]
