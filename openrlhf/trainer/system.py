"""The processes of a PPO run: started side by side, put to sleep and woken in turn, and ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ray

from openrlhf.cluster.group import NESTED_SECONDS, PendingCall, WorkerError, WorkerGroup
from openrlhf.cluster.placement import plan_placement
from openrlhf.cluster.ray_cluster import Cluster, cluster_gone, connect, create_cluster, object_store_bytes
from openrlhf.config import PPOConfig
from openrlhf.config.derive import data_copies
from openrlhf.engines.pool import EnginePool, start_engines
from openrlhf.engines.weight_sync.compare import Comparison
from openrlhf.trainer.turns import GIB, SharedMemory
from openrlhf.utils.files import temporary_folder
from openrlhf.utils.logging import get_logger
from openrlhf.utils.process import resident_bytes
from openrlhf.workers.model_worker import form_groups, start_group

logger = get_logger(__name__)

Report = Callable[[str], None]


def weight_transport(cfg: PPOConfig, device: str) -> str:
    """How weights travel: CUDA IPC where actor and engines share GPUs, NCCL where they don't, gloo on CPUs."""
    if device == "CPU" or cfg.vllm_sync_backend == "gloo":
        return "gloo"
    return "ipc" if cfg.colocate_all_models and not cfg.async_train else "nccl"


class WeightSync(NamedTuple):
    """What a weight sync did.

    Attributes:
        timings: seconds of its parts: "wake", "transfer", "room", and "compare" with ``--check_weight_sync``.
        trainer_logprobs: float32 ``[T]``, the actor's log-probs of the probe text; 0 for the first token.
        comparisons: with ``--check_weight_sync``, what the workers of each engine found; else None.
    """

    timings: dict[str, float]
    trainer_logprobs: np.ndarray
    comparisons: list[list[Comparison]] | None


@dataclass
class PPOSystem:
    """Engines and model workers of a run.

    Without engines (``--load_rollouts``) or models (``--rollout_only``) their groups are empty.
    With ``--vllm_enable_sleep`` engines and models take turns on the same GPUs; :meth:`generating` and
    :meth:`wake_models` are the two sides, :meth:`sync_weights` is the way from the second to the first.
    """

    cfg: PPOConfig
    cluster: Cluster
    engines: EnginePool
    actor: WorkerGroup
    critic: WorkerGroup | None
    ref: WorkerGroup | None
    reward: WorkerGroup | None

    def __post_init__(self) -> None:
        # Frozen models first: they only drop their copies.
        self._models = [group for group in (self.ref, self.reward, self.critic, self.actor) if group]
        self.memory = SharedMemory(self.cfg, self._models)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around the use of the engines: afterwards they sleep."""
        yield
        if self.cfg.vllm_enable_sleep:
            self.engines.sleep()

    def wake_models(self) -> None:
        """Before the use of the models: brings back what :meth:`sync_weights` moved off their devices."""
        self.memory.bring_back()

    def prepare_save(self) -> None:
        """Before a save while the engines are awake. Where models and engines take turns, a sync ends it."""
        if self.cfg.vllm_enable_sleep:
            self.engines.sleep()
        self.wake_models()

    def sync_weights(self, probe: Sequence[int], version: int) -> WeightSync:
        """Send the actor's weights to the engines and make these ready to generate.

        Args:
            probe: token ids of a text that the actor scores before its weights leave the device.
            version: the weights' number, which the tokens that they sample will carry.
        """
        timings: dict[str, float] = {}
        with _timed(timings, "wake"):
            if self.cfg.vllm_enable_sleep:
                self.memory.release()
                self.engines.wake(["weights"])
        # The actor's own calls to the engines may take the limit, and it names the one that does not answer.
        limit = self.cfg.rollout_timeout + NESTED_SECONDS
        timings["transfer"] = float(max(self.actor.call("sync_weights", version, timeout=limit)))
        comparisons = None
        if self.cfg.check_weight_sync:
            with _timed(timings, "compare"):
                comparisons = self.compare_weights()
        logprobs = self.actor.call("probe", list(probe))[0]
        with _timed(timings, "room"):
            if self.cfg.deepspeed_enable_sleep:
                self.memory.make_room(self._engine_weights)
            elif self.cfg.vllm_enable_sleep:
                self.memory.release()  # what the transfer took, more than a GiB, is cached
        with _timed(timings, "wake"):
            if self.cfg.vllm_enable_sleep:
                self.engines.wake(["kv_cache"])
        return WeightSync(timings, logprobs, comparisons)

    @staticmethod
    def host_memory() -> dict[str, float]:
        """Metrics of this process's memory, and of the objects that Ray holds on all nodes."""
        figures = {"memory/driver_host_gib": resident_bytes() / GIB}
        if ray.is_initialized():
            with suppress(Exception):  # a cluster that is gone is told where it is needed
                figures["memory/object_store_gib"] = object_store_bytes() / GIB
        return figures

    def compare_weights(self) -> list[list[Comparison]]:
        """Let each worker of each engine compare its tensors with the actor's, which go there as files.

        The files are in the run's folder meanwhile, which all nodes must see.
        """
        with temporary_folder(Path(self.cfg.run_folder) / "weights") as folder:
            self.actor.call("write_weights", str(folder.absolute()))
            return self.engines.compare_weights(str(folder.absolute()))

    @cached_property
    def _engine_weights(self) -> int:
        """Bytes of weights that an engine holds on each GPU."""
        return int(self.actor.call("weight_bytes")[0]) // self.engines.workers_per_engine

    def close(self) -> None:
        """End all processes and leave the cluster; safe to call at any time."""
        try:
            if not cluster_gone():
                self.engines.shutdown()
        except WorkerError as error:  # not the run's failure, and no reason to hide that one
            logger.warning("engines are killed: %s", str(error).splitlines()[0])
        finally:
            _end([*self._models, self.engines.group], self.cluster)


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    timings[name] = timings.get(name, 0.0) + time.monotonic() - started


def cluster_device() -> str:
    """The Ray resource that models run on: "GPU" if the cluster has any, else "CPU"."""
    return "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"


def start_system(cfg: PPOConfig, *, actor_steps: int, critic_steps: int, log_dir: Path, report: Report) -> PPOSystem:
    """Connect to Ray, place and start everything, and load the models.

    Args:
        cfg: a validated configuration.
        actor_steps, critic_steps: optimizer steps that the schedules span.
        log_dir: every process writes its output to a file there.
        report: gets one line a milestone.

    Raises:
        PlacementError: the cluster can't hold the plan, or not in time.
        WorkerError: a process failed while starting; with the end of its log.
    """
    report(connect())
    deadline = time.monotonic() + cfg.start_timeout

    def left() -> float:
        return max(1.0, deadline - time.monotonic())

    device = cluster_device()
    plan = plan_placement(cfg, device)
    report(f"Placement ({plan.title}):\n{plan.describe()}")
    cluster = create_cluster(plan, left())
    transport = weight_transport(cfg, device)
    device_type = "cuda" if device == "GPU" else "cpu"
    engines = EnginePool(WorkerGroup("engine", [], cfg.rollout_timeout), cfg.vllm_tensor_parallel_size)
    if "engine" in plan.role_names:
        engines = start_engines(cfg, cluster, device_type=device_type, transport=transport, log_dir=str(log_dir))
    started: list[WorkerGroup] = [engines.group]
    try:
        loading: list[PendingCall] = [engines.load(cfg)]
        groups: dict[str, WorkerGroup] = {}
        for role in plan.role_names:
            if role != "engine":
                groups[role] = start_group(role, cluster, str(log_dir), cfg.rollout_timeout, data_copies(cfg))
                started.append(groups[role])
        loading.extend(form_groups(list(groups.values()), left()))
        if device == "GPU" and cfg.colocate_all_models and not cfg.async_train:
            # vLLM sizes its cache by what is free while it starts, so nobody else may take memory then.
            PendingCall.results(loading, left())
            report(f"Engines ready after {cfg.start_timeout - left():.0f} s")
            if cfg.vllm_enable_sleep:
                engines.sleep()
            loading = []
        steps = {"critic": critic_steps}
        loading.extend(group.submit("load", cfg, steps.get(role, actor_steps)) for role, group in groups.items())
        PendingCall.results(loading, left())
        report(f"Models and engines ready after {cfg.start_timeout - left():.0f} s")
        system = PPOSystem(
            cfg,
            cluster,
            engines,
            groups.get("actor", WorkerGroup("actor", [], cfg.rollout_timeout)),
            groups.get("critic"),
            groups.get("ref"),
            groups.get("reward"),
        )
        if len(engines.group) > 0 and len(system.actor) > 0:
            connect_engines(system, transport, left())
        return system
    except BaseException:
        _end(started, cluster)
        raise


def connect_engines(system: PPOSystem, transport: str, timeout: float) -> None:
    """Open the weight transfer from the actor to the engines.

    Raises:
        WorkerError: a process failed, or an engine did not answer within ``timeout`` seconds.
    """
    system.actor.call(
        *("connect_engines", system.engines.group, transport, system.engines.workers_per_engine, timeout),
        timeout=timeout + NESTED_SECONDS,
    )


def _end(groups: Sequence[WorkerGroup], cluster: Cluster) -> None:
    if cluster_gone():
        return
    for group in groups:
        group.kill()
    cluster.remove()
