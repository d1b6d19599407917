"""Models and engines that take turns on the same GPUs: what leaves a GPU, when, and what each phase holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openrlhf.cluster.group import PendingCall, WorkerGroup
from openrlhf.config import PPOConfig

GIB = 2.0**30
ENGINE_WORKSPACE = 3 * GIB
"""What an engine takes beside weights and cache: activations, logits, CUDA graphs."""


class SharedMemory:
    """Moves the models' state off the GPUs for as long as the engines need the room, and no more of it than that.

    Args:
        cfg: how much of a GPU the engines take.
        groups: the models, those first that are cheapest to bring back. All are on the same GPUs.
    """

    def __init__(self, cfg: PPOConfig, groups: Sequence[WorkerGroup]) -> None:
        self._cfg = cfg
        self._groups = list(groups)
        self._away: list[WorkerGroup] = []

    def release(self) -> None:
        """Before the engines take their weights: models give back what they cached, which is a lot after training."""
        self._ask("room")

    def make_room(self, engine_weights: int) -> None:
        """Before the engines take their cache.

        Models are offloaded one after another until :func:`engine_room` is free; often none has to go.

        Args:
            engine_weights: bytes of weights that an engine holds on each GPU already.
        """
        if self._away:
            return
        # All of them first: what one process has cached since is missing for all.
        self.release()
        for group in self._groups:
            free, total = min(group.call("room"))
            if free >= engine_room(self._cfg, total, engine_weights):
                return
            group.call("offload")
            self._away.append(group)

    def bring_back(self) -> None:
        """Before the models are used."""
        for group in self._away:
            group.call("reload")
        self._away = []

    def figures(self, phase: str) -> dict[str, float]:
        """The metrics ``memory/<phase>_*`` in GiB: the largest of all model processes since the last call, and the
        smallest free memory of their devices. ``host`` is resident memory, wherever the rest is.
        """
        stats = self._ask("memory")
        return {
            f"memory/{phase}_allocated_gib": max(s.allocated for s in stats) / GIB,
            f"memory/{phase}_peak_gib": max(s.peak for s in stats) / GIB,
            f"memory/{phase}_reserved_gib": max(s.reserved for s in stats) / GIB,
            f"memory/{phase}_free_gib": min(s.free for s in stats) / GIB,
            f"memory/{phase}_host_gib": max(s.host for s in stats) / GIB,
        }

    def _ask(self, method: str) -> list[Any]:
        """Every process of every model at once."""
        calls = [group.submit(method) for group in self._groups]
        return [answer for answers in PendingCall.results(calls, self._cfg.rollout_timeout) for answer in answers]


def engine_room(cfg: PPOConfig, total: int, weights: int) -> float:
    """Bytes of a GPU that must be free before an engine which has its weights there takes the rest.

    It stays within ``vllm_gpu_memory_utilization``, its weights included, unless the size of its cache is given.
    """
    if not cfg.vllm_enable_sleep:
        return 0.0
    if cfg.vllm_kv_cache_gib is not None:
        return cfg.vllm_kv_cache_gib * GIB + ENGINE_WORKSPACE
    return cfg.vllm_gpu_memory_utilization * total - weights
