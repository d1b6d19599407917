"""Model workers: one Ray actor a rank, each with a DeepSpeed engine. Few coarse methods, called on all ranks."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from openrlhf.cluster.group import NESTED_SECONDS, Member, PendingCall, WorkerGroup
from openrlhf.cluster.ray_cluster import Cluster
from openrlhf.config import PPOConfig
from openrlhf.utils.network import node_address
from openrlhf.utils.process import THREADS, available_cores, chosen_threads, redirect_output, seed_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.algorithms.metrics import MetricSum
    from openrlhf.batching.microbatch import MicroBatch
    from openrlhf.platform import MemoryStats
    from openrlhf.workers.backoff import MemoryBackoff
    from openrlhf.workers.deepspeed_engine import TrainEngine
    from openrlhf.workers.messages import StepBatch

# torch, DeepSpeed and the model code are imported inside the methods: the visible devices and the number of threads
# must be set before, and the driver, which imports these classes to start them, needs none of it.


class ModelWorker:
    """What all roles have in common: process set-up, forward passes, offload.

    Args:
        role: "actor", "critic", "ref" or "reward".
        rank: among the processes of the role.
        world_size: their number.
        log_file: where everything that this process prints goes.
        visible_devices: CUDA_VISIBLE_DEVICES, or None without GPUs.
        sharers: processes that share the node's cores with this one, itself included; None: OMP_NUM_THREADS says how
            many threads it has.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        world_size: int,
        log_file: str,
        visible_devices: str | None,
        sharers: int | None = None,
    ) -> None:
        redirect_output(log_file)
        if sharers is not None:
            # Ray's own choice goes by the part of a core that the process books, and is one thread.
            os.environ[THREADS] = str(max(1, available_cores() // sharers))
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.cfg: PPOConfig
        self.engine: TrainEngine
        self.backoff: MemoryBackoff
        self._store: Any = None

    # --- set-up ---------------------------------------------------------------------------------------------------

    def open_store(self) -> tuple[str, int]:
        """On rank 0: open the meeting point of the ranks on a port that the system chose, and keep it."""
        from openrlhf.workers.rendezvous import open_store

        host = node_address()
        self._store = open_store(host, self.world_size)
        return host, int(self._store.port)

    def join(self, host: str, port: int, join_timeout: float, timeout: float) -> None:
        """Form the process group of the role; see :func:`openrlhf.workers.rendezvous.join_group`."""
        from openrlhf import platform
        from openrlhf.workers.rendezvous import join_group

        platform.prepare_process()
        platform.set_device(0)
        join_group(
            self.rank, self.world_size, host, port, join_timeout=join_timeout, timeout=timeout, store=self._store
        )
        # What load() needs, while the engines are still starting: it takes longer than reading the weights.
        import openrlhf.models.logprobs
        import openrlhf.workers.backoff
        import openrlhf.workers.objectives  # noqa: F401

    def load(self, cfg: PPOConfig, total_steps: int) -> None:
        """Build the model and its engine.

        Args:
            cfg: the run's configuration.
            total_steps: optimizer steps that the learning-rate schedule spans.
        """
        self.cfg = cfg
        from openrlhf.workers.backoff import MemoryBackoff

        # On all ranks the same: they make the same heads and adapters. A resume restores its own states afterwards.
        seed_process(cfg.seed, cfg.full_determinism)
        self.engine = self._build(cfg, total_steps)
        self.backoff = MemoryBackoff(self.engine)

    def _build(self, cfg: PPOConfig, total_steps: int) -> TrainEngine:
        raise NotImplementedError

    # --- work ------------------------------------------------------------------------------------------------------

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Run without gradients; one float32 array a micro-batch, per token or (reward) per sequence."""
        self.engine.eval()
        with self.engine.weights_on_device():
            outputs = [self.backoff.forward(micro_batch, self._forward_one) for micro_batch in micro_batches]
        return [output.float().cpu().numpy() for output in outputs]

    def _forward_one(self, batch: MicroBatch) -> Any:
        raise NotImplementedError

    def weight_bytes(self) -> int:
        """Size of the whole model's weights as they are sent to engines."""
        from openrlhf.models.export import exported_weights

        return sum(weight.nbytes for weight in exported_weights(self.engine.hf_model))

    def room(self) -> tuple[int, int]:
        """Free and total bytes of the device, once this process has given back what it does not use.

        A CPU has no share that an engine could ask for, so that nothing counts as free there.
        """
        from openrlhf import platform

        if platform.device_type() == "cpu":
            return -1, platform.memory_stats().total
        platform.empty_cache()
        stats = platform.memory_stats()
        return stats.free, stats.total

    def memory(self) -> MemoryStats:
        """What this process and its device hold now; the peak is that since the last call."""
        from openrlhf import platform

        stats = platform.memory_stats()
        platform.reset_peak_memory()
        return stats

    def offload(self) -> None:
        """Move what is not needed until the next call to CPU memory."""
        self.engine.offload_states()

    def reload(self) -> None:
        """Bring back what :meth:`offload` moved away."""
        self.engine.reload_states()


class TrainedWorker(ModelWorker):
    """A role with an optimizer: training steps and checkpoints."""

    prefix = ""
    """Of the metrics ``lr`` and ``grad_norm``."""

    def train(self, steps: Sequence[StepBatch]) -> MetricSum:
        """Run optimizer steps; the same number on all ranks.

        Returns:
            This rank's part of the metrics, to be merged with the other ranks'.

        Raises:
            FloatingPointError: a NaN or infinity in an output, a loss or a gradient; the step is not taken.
        """
        from openrlhf.algorithms.metrics import STEP, MetricSum

        self.engine.train()
        metrics = MetricSum()
        for step in steps:
            loss_of = functools.partial(self._loss, step=step)
            metrics = metrics.merge(self.backoff.accumulate(step.micro_batches, loss_of))
            stats = self.engine.step(step.progress)
            metrics.add(f"{self.prefix}_grad_norm", stats.grad_norm, 1.0, STEP)
            metrics.set_latest(f"{self.prefix}_lr", stats.lr)
        return metrics.to_numbers()

    def _loss(self, batch: MicroBatch, step: StepBatch) -> tuple[Any, MetricSum]:
        raise NotImplementedError

    def save_checkpoint(
        self, client_state: dict[str, Any], folder: str, tag: str, max_num: int | None, max_mem_gib: float
    ) -> None:
        """Write a resumable checkpoint, complete or not at all, and remove old ones (None: keep all)."""
        self.engine.save_checkpoint(folder, tag, client_state, max_num, max_mem_gib, self._tokenizer)

    def load_checkpoint(self, folder: str, tag: str | None = None) -> dict[str, Any]:
        """Restore model, optimizer, schedule and random states; rank 0 returns what was saved as client state."""
        state = self.engine.load_checkpoint(folder, tag)
        return state if self.rank == 0 else {}

    def save_hf(self, folder: str) -> None:
        """Write a Hugging Face folder, tokenizer included."""
        self.engine.save_hf(folder, self._tokenizer)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What rank 0 saves beside the model; the others don't read it."""
        if self.rank != 0:
            return None
        from openrlhf.models.loading import load_tokenizer

        return load_tokenizer(self.cfg.model_path, use_fast=not self.cfg.disable_fast_tokenizer)


class PolicyWorker(TrainedWorker):
    """A rank of the actor."""

    prefix = "actor"

    def _build(self, cfg: PPOConfig, total_steps: int) -> TrainEngine:
        from openrlhf.models.loading import load_causal_lm
        from openrlhf.models.logprobs import PolicyModel
        from openrlhf.models.vision import freeze_visual_encoder
        from openrlhf.workers.checkpoint_writes import check_places
        from openrlhf.workers.custom_algorithms import load_custom_algorithms
        from openrlhf.workers.deepspeed_engine import TrainEngine
        from openrlhf.workers.objectives import PolicyObjective
        from openrlhf.workers.optimizer import SchedulerSpec, optimizer_spec

        if self.rank == 0:
            check_places(cfg)
        load_custom_algorithms(cfg)
        self.objective = PolicyObjective(cfg)
        model = load_causal_lm(cfg.model_path, cfg)
        if cfg.freeze_visual_encoder:
            freeze_visual_encoder(model)
        return TrainEngine(
            PolicyModel(model, cfg.packing_samples, aux_loss=cfg.aux_loss_coef > 0, fp32_head=cfg.fp32_lm_head),
            cfg,
            optimizer=optimizer_spec(cfg, cfg.actor_learning_rate),
            scheduler=SchedulerSpec(cfg.lr_scheduler, total_steps, cfg.lr_warmup_ratio, cfg.min_lr_ratio),
            average_decay=cfg.ema_beta if cfg.enable_ema else None,
        )

    def _forward_one(self, batch: MicroBatch) -> Any:
        return self.engine(batch, temperature=self.cfg.temperature).logprobs

    def _loss(self, batch: MicroBatch, step: StepBatch) -> tuple[Any, MetricSum]:
        from openrlhf.workers.objectives import check_finite

        outputs = self.engine(batch, temperature=self.cfg.temperature, entropy=self.objective.needs_entropy)
        check_finite(batch, outputs.logprobs, "the policy's log-probability")
        return self.objective(batch, step, outputs.logprobs, outputs.entropy, outputs.aux_loss)

    # --- weight sync -----------------------------------------------------------------------------------------------

    def connect_engines(self, engines: WorkerGroup, transport: str, workers_per_engine: int, timeout: float) -> None:
        """Open the weight transfer to the engines; each has ``timeout`` seconds to answer."""
        from openrlhf.engines.weight_sync.sender import open_sender
        from openrlhf.workers.weight_source import TrainerSource

        self._sender = open_sender(
            transport,
            TrainerSource(self.engine),
            engines,
            workers_per_engine=workers_per_engine,
            rank=self.rank,
            timeout=timeout,
        )

    def sync_weights(self, version: int) -> float:
        """Send all weights to all engines under this version number; returns the seconds it took."""
        started = time.monotonic()
        self._sender.send(version)
        return time.monotonic() - started

    def write_weights(self, folder: str, bucket_bytes: int = 1 << 30) -> None:
        """Write what :meth:`sync_weights` sends into a folder of safetensors files; all ranks call it.

        Ranks take turns, and a file is written while the next ones are gathered: writing takes a second a GiB.

        Args:
            bucket_bytes: most bytes in a file; a larger weight comes alone.
        """
        from safetensors.torch import save_file

        with ThreadPoolExecutor(1) as writer:
            pending: Future[None] | None = None
            for index, bucket in enumerate(self.engine.gathered_parameters(bucket_bytes)):
                own = index % self.world_size == self.rank
                tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket} if own else {}
                bucket.clear()  # or it would be held while the next one is gathered
                if not own:
                    continue
                if pending is not None:
                    pending.result()
                pending = writer.submit(save_file, tensors, os.path.join(folder, f"{index:05d}.safetensors"))
            if pending is not None:
                pending.result()

    def probe(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-probs at temperature 1 of a text's tokens: float32[T], 0 for the first."""
        import torch

        from openrlhf.batching.microbatch import pack

        self.engine.eval()
        batch = self.engine.place(pack([np.asarray(token_ids)], {}, [0]))
        with torch.no_grad():
            return self.engine(batch, temperature=1.0).logprobs.float().cpu().numpy()


class CriticWorker(TrainedWorker):
    """A rank of the critic."""

    prefix = "critic"

    def _build(self, cfg: PPOConfig, total_steps: int) -> TrainEngine:
        from openrlhf.models.loading import load_sequence_regression
        from openrlhf.models.logprobs import ValueModel
        from openrlhf.workers.deepspeed_engine import TrainEngine
        from openrlhf.workers.optimizer import SchedulerSpec, optimizer_spec

        own = critic_options(cfg)
        # Rewards from elsewhere than a reward model are not normalised.
        normalize = cfg.normalize_reward and cfg.reward_pretrain is not None
        path = cfg.critic_pretrain or cfg.model_path
        model = load_sequence_regression(path, cfg, head_prefix=cfg.value_head_prefix, init_head=path == cfg.model_path)
        return TrainEngine(
            ValueModel(model, packing=cfg.packing_samples, normalize=normalize),
            own,
            optimizer=optimizer_spec(own, cfg.critic_learning_rate),
            scheduler=SchedulerSpec(own.lr_scheduler, total_steps, own.lr_warmup_ratio, own.min_lr_ratio),
        )

    def _forward_one(self, batch: MicroBatch) -> Any:
        return self.engine(batch)

    def _loss(self, batch: MicroBatch, step: StepBatch) -> tuple[Any, MetricSum]:
        from openrlhf.workers.objectives import check_finite, value_objective

        values = self.engine(batch)
        check_finite(batch, values, "the critic's value")
        return value_objective(self.cfg, batch, step, values)


def critic_options(cfg: PPOConfig) -> PPOConfig:
    """The configuration with the critic's own optimizer flags, where given, in the place of the actor's."""
    names = ("max_norm", "l2", "adam_betas", "adam_eps", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "optim")
    muon = ("muon_lr", "muon_momentum", "muon_ns_steps", "muon_nesterov")
    own = {name: getattr(cfg, f"critic_{name}") for name in (*names, *muon)}
    return dataclasses.replace(cfg, **{name: value for name, value in own.items() if value is not None})


class ReferenceWorker(ModelWorker):
    """A rank of the frozen reference policy."""

    def _build(self, cfg: PPOConfig, total_steps: int) -> TrainEngine:
        from openrlhf.models.loading import load_causal_lm
        from openrlhf.models.logprobs import PolicyModel
        from openrlhf.workers.deepspeed_engine import TrainEngine

        model = load_causal_lm(cfg.model_path, cfg, trainable=False, offload=cfg.ref_offload)
        policy = PolicyModel(model, cfg.packing_samples, fp32_head=cfg.fp32_lm_head)
        return TrainEngine(policy, cfg, optimizer=None, param_offload=cfg.ref_offload)

    def _forward_one(self, batch: MicroBatch) -> Any:
        return self.engine(batch, temperature=self.cfg.temperature).logprobs


class RewardWorker(ModelWorker):
    """A rank of the reward model; answers one score a sequence."""

    def _build(self, cfg: PPOConfig, total_steps: int) -> TrainEngine:
        from openrlhf.models.loading import load_sequence_regression
        from openrlhf.models.logprobs import RewardModel
        from openrlhf.workers.deepspeed_engine import TrainEngine

        assert cfg.reward_pretrain is not None
        model = load_sequence_regression(
            cfg.reward_pretrain,
            cfg,
            head_prefix=cfg.value_head_prefix,
            trainable=False,
            offload=cfg.reward_offload,
        )
        reward = RewardModel(model, packing=cfg.packing_samples, normalize=cfg.normalize_reward)
        return TrainEngine(reward, cfg, optimizer=None, param_offload=cfg.reward_offload)

    def _forward_one(self, batch: MicroBatch) -> Any:
        return self.engine(batch).scores


ROLE_WORKERS: dict[str, type[ModelWorker]] = {
    "actor": PolicyWorker,
    "critic": CriticWorker,
    "ref": ReferenceWorker,
    "reward": RewardWorker,
}
TRAINED_ROLES = {role for role, worker in ROLE_WORKERS.items() if issubclass(worker, TrainedWorker)}
"""They train at the same time."""


def start_group(role: str, cluster: Cluster, log_dir: str, timeout: float, data_copies: int = 1) -> WorkerGroup:
    """Start the processes of a role in their bundles.

    Args:
        role: a key of :data:`ROLE_WORKERS`.
        cluster: where the bundles are.
        log_dir: each rank writes to ``<log_dir>/<role>-<rank>.log``.
        timeout: seconds that a call to the group may take.
        data_copies: see :class:`WorkerGroup`.
    """
    world_size = next(r.processes for r in cluster.plan.group_of(role).roles if r.name == role)
    actor_class = ray.remote(ROLE_WORKERS[role])
    members = []
    # Others wait while these work on the CPU.
    together = TRAINED_ROLES if role in TRAINED_ROLES else {role}
    for rank in range(world_size):
        sharers = None if chosen_threads(os.environ) else cluster.processes_beside(role, rank, together)
        log_file = os.path.join(log_dir, f"{role}-{rank}.log")
        handle = actor_class.options(**cluster.actor_options(role, rank)).remote(
            role, rank, world_size, log_file, cluster.visible_devices(role, rank), sharers
        )
        members.append(Member(f"{role} rank {rank}", handle, log_file))
    return WorkerGroup(role, members, timeout, data_copies)


def form_groups(groups: Sequence[WorkerGroup], timeout: float) -> list[PendingCall]:
    """Let the ranks of each role meet within ``timeout`` seconds; wait for the results elsewhere.

    A collective of theirs may take longer than a call of the group: while one rank waits for an engine that does not
    answer, the others wait for it.
    """
    # Opened side by side: each first imports torch.
    stores = PendingCall.results([group.submit_first("open_store") for group in groups], timeout)
    return [
        group.submit("join", host, port, timeout, group.timeout + NESTED_SECONDS)
        for group, [(host, port)] in zip(groups, stores, strict=True)
    ]
