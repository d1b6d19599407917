"""Checkpoints of a PPO run: actor and critic under one tag, the best by an evaluation metric, and the final model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openrlhf.cluster.group import WorkerGroup
from openrlhf.config import PPOConfig
from openrlhf.config.derive import data_parallel_size
from openrlhf.config.options_ppo import NO_METRIC
from openrlhf.trainer.system import PPOSystem
from openrlhf.workers.checkpoint_files import CheckpointError, resume_tag, rotate_checkpoints


class PPOCheckpoints:
    """Saves and restores the trained roles of a run.

    ``<ckpt_path>/_actor`` and ``<ckpt_path>/_critic`` hold the resumable parts, ``<tag>_hf`` beside them the
    Hugging Face copies (``--save_hf_ckpt``), which are all kept: people evaluate them after the run.
    """

    def __init__(self, cfg: PPOConfig, system: PPOSystem) -> None:
        self._cfg = cfg
        self._system = system
        self._root = Path(cfg.ckpt_path)
        self._best_key: str | None = None
        self._best_value: float | None = None

    def save(self, step: int, client_state: dict[str, Any]) -> None:
        """Write the regular checkpoint of a step."""
        self._write(f"global_step{step}", client_state, keep=self._cfg.max_ckpt_num)

    def improves(self, metrics: dict[str, float]) -> bool:
        """After an evaluation: is the metric of the best checkpoint better than ever? Remembers it if so."""
        written = not self._cfg.rollout_only and (self._cfg.save_hf_ckpt or not self._cfg.disable_ds_ckpt)
        if self._cfg.best_metric_key == NO_METRIC or not written:
            return False
        key = self._cfg.best_metric_key or next(k for k in sorted(metrics) if k.endswith("_pass1"))
        if self._best_key == key and self._best_value is not None and metrics[key] <= self._best_value:
            return False
        self._best_key, self._best_value = key, metrics[key]
        return True

    def save_best(self, step: int, client_state: dict[str, Any]) -> None:
        """Write ``best_global_step<N>``."""
        self._write(f"best_global_step{step}", client_state, keep=None)

    def best_state(self) -> dict[str, Any]:
        """What the client state of a checkpoint says about the best metric so far."""
        return {"best_eval_metric_key": self._best_key, "best_eval_metric_value": self._best_value}

    def load(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint of all trained roles; None when there is none.

        Raises:
            WorkerError: a checkpoint is damaged or does not fit this run.
            CheckpointError: no checkpoint has the format that was asked for, or the critic lacks the actor's newest.
        """
        universal = self._cfg.use_ds_universal_ckpt
        tag = resume_tag(self._root / "_actor", universal)
        if tag is None:
            return None
        other = resume_tag(self._root / "_critic", universal) if self._system.critic is not None else tag
        # A run that was killed between the two has a newer one of the critic.
        if other != tag and (universal or not (self._root / "_critic" / tag).is_dir()):
            raise CheckpointError(
                f"{self._root} has checkpoint {tag} of the actor, but {other} of the critic; point both `latest` files "
                "(`latest_universal` with --use_ds_universal_ckpt) to a tag that both have"
            )
        state: dict[str, Any] = self._system.actor.call("load_checkpoint", str(self._root / "_actor"), tag)[0]
        if self._system.critic is not None:
            self._system.critic.call("load_checkpoint", str(self._root / "_critic"), tag)
        self._best_key = state.get("best_eval_metric_key")
        self._best_value = state.get("best_eval_metric_value")
        return state

    def save_final(self) -> None:
        """Write the policy to ``save_path``, and the critic beside it when asked."""
        self._system.actor.call("save_hf", self._cfg.save_path)
        if self._cfg.save_value_network and self._system.critic is not None:
            self._system.critic.call("save_hf", self._cfg.save_path + "_critic")

    def _write(self, tag: str, client_state: dict[str, Any], keep: int | None) -> None:
        if self._cfg.save_hf_ckpt:
            self._system.actor.call("save_hf", str(self._root / f"{tag}_hf"))
        if self._cfg.disable_ds_ckpt:
            return
        critic = self._system.critic
        # The critic first: `latest` of the actor, which a resume looks at, moves when both are complete. Until then
        # no older one of the critic goes either.
        if critic is not None:
            self._save(critic, "_critic", tag, client_state, None)
        self._save(self._system.actor, "_actor", tag, client_state, keep)
        if critic is not None and keep is not None:
            rotate_checkpoints(self._root / "_critic", keep, self._cfg.max_ckpt_mem)

    def _save(self, group: WorkerGroup, folder: str, tag: str, client_state: dict[str, Any], keep: int | None) -> None:
        # Finished groups that wait make gigabytes of it, which all ranks would write (ZeRO-3): the first data gets it.
        states = [client_state] + [{}] * (data_parallel_size(self._cfg, len(group)) - 1)
        arguments = (str(self._root / folder), tag, keep, self._cfg.max_ckpt_mem)
        group.call("save_checkpoint", *arguments, per_rank=states)
