"""The two halves of a PPO run on their own: only rollouts, and only training on rollouts of a dump."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.config import PPOConfig
from openrlhf.config.derive import optimizer_steps
from openrlhf.rollout.dump import DumpError, count_groups, dump_files, read_rollout_dump
from openrlhf.rollout.filters import CollectedGroups, GroupTally
from openrlhf.rollout.group import Group, PromptItem
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.experience import sample_metrics
from openrlhf.trainer.ppo import PPOTrainer


class RolloutOnlyTrainer(PPOTrainer):
    """Writes rollouts of the model as it is (``--rollout_only``): there are engines, and no model that trains."""

    def _sync_weights(self) -> dict[str, float]:
        return {}  # the engines loaded the model themselves

    def _train_on(self, groups: Sequence[Group]) -> dict[str, float]:
        experience = self._collect(groups)
        self._dump(experience)
        return sample_metrics(experience.trajectories, self.cfg)

    def _save_final(self) -> None:
        self.console.say(f"Wrote {self.global_step} rollouts to {self.cfg.dump_rollouts}")


class ReplayTrainer(PPOTrainer):
    """Trains on the rollouts of a dump, one after another (``--load_rollouts``): there are no engines.

    Args:
        files: a rollout each; see :func:`replayed_files`.
        arguments: those of :class:`PPOTrainer`.
    """

    def __init__(self, files: Sequence[Path], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._files = files
        self.total_rollouts = len(files)

    def _finished(self) -> bool:
        return self.global_step >= len(self._files)

    def _sync_weights(self) -> dict[str, float]:
        return {}

    def _roll_out(self) -> CollectedGroups:
        path = self._files[self.global_step]
        with self.console.phase("read"):
            groups = dumped_groups(path)
        tally = GroupTally(None)
        for group in groups:
            tally.judge(group)
        return CollectedGroups(tuple(groups), tally)


def replayed_files(cfg: PPOConfig) -> list[Path]:
    """The rollouts that ``--load_rollouts`` names, at most ``--max_steps``.

    Raises:
        DumpError: there are none.
    """
    assert cfg.load_rollouts is not None
    files = dump_files(cfg.load_rollouts)
    if not files:
        raise DumpError(f"--load_rollouts {cfg.load_rollouts} has no files rollout_step_*.jsonl")
    return files if cfg.max_steps < 0 else files[: cfg.max_steps]


def replayed_steps(cfg: PPOConfig, files: Sequence[Path]) -> int:
    """Length of the schedule: the optimizer steps, if each prompt has as many samples as the flags say."""
    return sum(optimizer_steps(cfg, count_groups(file)) for file in files)


def dumped_groups(path: Path) -> list[Group]:
    """The groups of a dump file. What the run lost (failures, cut prompts) is not among them.

    Raises:
        DumpError: the file is damaged or empty.
    """
    samples, baselines = read_rollout_dump(path)
    if not samples:
        raise DumpError(f"{path} has no samples")
    by_group: dict[int, list[Trajectory]] = {}
    for trajectory in samples:
        by_group.setdefault(trajectory.group_id, []).append(trajectory)
    greedy = {trajectory.group_id: trajectory for trajectory in baselines}
    return [Group(_item(own[0]), tuple(own), baseline=greedy.get(group)) for group, own in by_group.items()]


def _item(trajectory: Trajectory) -> PromptItem:
    facts = trajectory.metadata
    ids = trajectory.token_ids[: trajectory.prompt_length].tolist()
    return PromptItem(
        trajectory.prompt_id, trajectory.group_id, str(facts.get("prompt", "")), ids, facts.get("label", "")
    )
