"""Training and inference of one model on DeepSpeed ZeRO, the same on one CPU process and on many GPUs."""

from __future__ import annotations

import contextlib
import math
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from openrlhf import platform
from openrlhf.batching import MicroBatch
from openrlhf.batching.buckets import in_buckets
from openrlhf.config.derive import data_copies
from openrlhf.config.options_model import DeepSpeedOptions
from openrlhf.models.export import exported_weights, is_finite
from openrlhf.models.loading import save_tokenizer, unwrap_hf, vocabulary_size, write_hf_folder
from openrlhf.models.logprobs import share_sequences
from openrlhf.models.lora import is_peft
from openrlhf.models.partition import effective_zero_stage, whole
from openrlhf.models.quantized import is_quantized
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.logging import get_logger
from openrlhf.workers import checkpoint_files as files
from openrlhf.workers.broken_gradients import BrokenGradients
from openrlhf.workers.checkpoint_fit import Setup, check_fit
from openrlhf.workers.checkpoint_writes import Writes
from openrlhf.workers.deepspeed_config import (
    deepspeed_config,
    group_second_copies,
    offloads_adam,
    on_gpu,
    tame_deepspeed,
)
from openrlhf.workers.distributed import any_rank, barrier, raise_together
from openrlhf.workers.frozen import FrozenWeights
from openrlhf.workers.moving_average import MovingAverage
from openrlhf.workers.muon import MuonWithAdamW
from openrlhf.workers.offload import drop_gradients, offload_engine
from openrlhf.workers.optimizer import OptimizerSpec, SchedulerSpec, build_optimizer, build_scheduler
from openrlhf.workers.tensor_parallel import (
    accept_batches,
    divide_frozen,
    gradient_norm,
    tensor_parallel_config,
    unite_replicas,
)

logger = get_logger(__name__)

__all__ = ["NonFiniteError", "OptimizerSpec", "SchedulerSpec", "StepStats", "TrainEngine"]


class StepStats(NamedTuple):
    """What one optimizer step did.

    Attributes:
        grad_norm: global 2-norm of the gradient before clipping.
        lr: learning rate that was used.
        skipped: fp16 only: the gradient overflowed, the loss scale was lowered and the weights are unchanged.
    """

    grad_norm: float
    lr: float
    skipped: bool


class NonFiniteError(ExplainedError, FloatingPointError):
    """A loss or gradient is NaN or infinite. The weights were not touched."""


class NumberFormatError(ExplainedError, ValueError):
    """The device does not compute in the number format that the flags ask for."""


class TrainEngine:
    """A model with its optimizer, partitioned over the ranks of the process group.

    One optimizer step::

        for i, batch in enumerate(micro_batches):          # equally many on every rank
            outputs = engine(batch)
            engine.backward(loss(outputs), last=i == len(micro_batches) - 1)
        stats = engine.step()

    Losses are sums divided by a denominator of the whole optimizer step over all ranks. The engine adds gradients
    up, over micro-batches and over ranks; it averages nothing.

    Args:
        model: module whose ``hf_model`` is the transformers (or peft) model; on the CPU, or partitioned already.
        opts: how it is partitioned and optimised.
        optimizer: None for inference only.
        scheduler: None for a constant rate.
        param_offload: keep parameters on the CPU (ZeRO-3 fetches them layer by layer; below, the whole model
            moves to the device for a forward pass, or for several: :meth:`weights_on_device`).
        average_decay: keep a moving average of the weights with this decay, and save that one as Hugging Face folder.
            Rank 0 holds it in CPU memory (float32); each optimizer step brings all trained weights there.

    Raises:
        NumberFormatError: fp16 without a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        opts: DeepSpeedOptions,
        optimizer: OptimizerSpec | None,
        scheduler: SchedulerSpec | None = None,
        *,
        param_offload: bool = False,
        average_decay: float | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("call openrlhf.workers.distributed.init_distributed() before building a TrainEngine")
        if opts.param_dtype == "fp16" and not on_gpu():
            raise NumberFormatError("--param_dtype fp16 does not run on a CPU; use fp32 or bf16")
        tame_deepspeed()
        self.opts = opts
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
        self.training = optimizer is not None
        self.param_offload = param_offload
        self.data_copies = data_copies(opts)
        share_sequences(model, opts.ring_attn_size)
        self.step_count = 0
        self._lineage: str | None = uuid.uuid4().hex
        self._finite: Tensor | None = None  # stays on the device: looking at it would wait for the GPU
        self._pending = 0
        self._asleep = False
        self._weights_are_here = False
        self._universal = opts.use_ds_universal_ckpt
        # 4-bit weights are frozen: they come from their folder again, and not from a checkpoint
        self._quantized = any(is_quantized(p) for p in model.parameters())
        self._stage = effective_zero_stage(opts.zero_stage, keep=param_offload or self._universal)
        if self.training and self._stage != opts.zero_stage:
            logger.info("one rank has nothing to partition: --zero_stage %d runs as %d", opts.zero_stage, self._stage)
        config = deepspeed_config(opts, self._stage, training=self.training, param_offload=param_offload)
        config |= tensor_parallel_config(opts.ds_tensor_parallel_size, model, self.training)
        self._engine: Any = None
        if optimizer is not None:
            built = build_optimizer(model, optimizer, offloads_adam(opts))
            schedule = build_scheduler(built, scheduler, optimizer.lr) if scheduler is not None else None
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=built, lr_scheduler=schedule, config=config, dist_init_required=False
            )
            if isinstance(built, MuonWithAdamW):
                built.bind(self._engine.optimizer)
        elif self._stage == 3:
            group_second_copies(opts.zpg)
            self._engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        else:
            divide_frozen(model, config)
        accept_batches(self._engine)
        self.module: nn.Module = self._engine.module if self._engine is not None else model
        if not self.training:
            self.module.requires_grad_(False).eval()
        self._vocabulary = vocabulary_size(unwrap_hf(self.hf_model).config)
        self._frozen: FrozenWeights | None = None
        if self.training:
            self._broken = BrokenGradients(self.hf_model, self._engine.optimizer)
            # of LoRA, nearly the whole model
            self._frozen = FrozenWeights((p for p in self.module.parameters() if not p.requires_grad), self.device)
        elif not (param_offload and self._stage == 3):
            self._frozen = FrozenWeights((*self.module.parameters(), *self.module.buffers()), self.device)
            if param_offload:
                self._frozen.to_cpu()
            else:
                self._frozen.to_device()
        self.average = MovingAverage(average_decay) if average_decay is not None else None
        if self.average is not None:
            self.average.update(self._saved_state(dist.get_rank() == 0))

    # ------------------------------------------------------------------------------------------ forward, backward

    @property
    def hf_model(self) -> nn.Module:
        """The transformers (or peft) model inside."""
        return getattr(self.module, "hf_model", self.module)

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that see different data; ``data_copies`` neighbouring ranks see the same."""
        return dist.get_world_size() // self.data_copies

    @property
    def data_parallel_rank(self) -> int:
        """The group of this rank."""
        return dist.get_rank() // self.data_copies

    def place(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch on the engine's device; one that is on a GPU already was placed before.

        Raises:
            UnknownTokenError: the model has no embedding of a token.
        """
        if batch.input_ids.device.type == "cpu":  # a look at a GPU's waits for all that it has to do
            batch.require_known(self._vocabulary)
        return batch.to(self.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Every rank must call it equally often under ZeRO-3."""
        self._require_awake("a forward pass")
        with self.weights_on_device():
            return (self.module if self._engine is None else self._engine)(*args, **kwargs)

    @contextlib.contextmanager
    def weights_on_device(self) -> Iterator[None]:
        """For several passes at once: weights that ``param_offload`` keeps on the CPU come to the device once."""
        if self._frozen is None or not self.param_offload or self._weights_are_here:
            yield
            return
        self._frozen.to_device()
        self._weights_are_here = True
        try:
            yield
        finally:
            self._weights_are_here = False
            self._frozen.to_cpu()

    def train(self) -> None:
        """Training mode."""
        self.module.train()

    def eval(self) -> None:
        """Evaluation mode."""
        self.module.eval()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch.

        Args:
            loss: scalar, already divided by the denominator of the whole optimizer step.
            last: True for the last micro-batch before :meth:`step`; then ranks exchange gradients.
        """
        self._require_training("backward")
        finite = torch.isfinite(loss.detach())
        self._finite = finite if self._finite is None else self._finite & finite
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over all ranks; the sum is wanted. The gradient of a loss that is not finite may
        # be: as a NaN it stops the step, on all ranks, where DeepSpeed measures it.
        factor = torch.where(finite, float(self._engine.dp_world_size), math.nan)
        self._engine.backward(loss * factor, scale_wrt_gas=False)
        self._pending = 0 if last else self._pending + 1

    def passes_alone(self, training: bool) -> bool:
        """Whether this rank may repeat a pass that failed: no other one waits for it in the middle of a pass.

        Args:
            training: with a backward pass; False = a forward pass without gradients.
        """
        if self._stage == 3 or self.data_copies > 1:
            return False
        return not training or (dist.get_world_size() == 1 and not offloads_adam(self.opts))

    def discard_gradients(self) -> None:
        """Forget everything since the last :meth:`step`, also a backward pass that ended with an error half-way.

        Raises:
            RuntimeError: the pass was one that other ranks take part in.
        """
        self._require_training("discard_gradients")
        if not self.passes_alone(training=True):
            raise RuntimeError("gradients can't be dropped on one rank alone")
        self._pending, self._finite = 0, None
        self._engine.zero_grad()
        if hasattr(self._engine.optimizer, "averaged_gradients"):
            drop_gradients(self._engine.optimizer)

    def step(self, progress: float = 1.0) -> StepStats:
        """Clip the gradient and update the weights.

        Args:
            progress: steps of the learning rate's schedule that this one stands for.

        Raises:
            NonFiniteError: the loss or the gradient is not finite, on any rank; raised on all of them, before the
                weights change.
        """
        self._require_training("step")
        if self._pending:
            raise RuntimeError("step() before the last backward(): call backward(loss, last=True) first")
        if self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.prepare(progress)
        lr = float(self._engine.optimizer.param_groups[0]["lr"])
        finite = self._finite is None or bool(self._finite)
        self._finite = None
        own_norm = gradient_norm(self.module.parameters(), self.data_parallel_size) if self._is_plain else None
        self._broken.expect()
        if own_norm is not None and not math.isfinite(own_norm):
            self._broken.look()
            self._engine.zero_grad()
            self._refuse(finite, own_norm)
        self._engine.step()
        if self.opts.ds_tensor_parallel_size > 1:
            unite_replicas(self.module.parameters())
        norm = own_norm if own_norm is not None else float(self._engine.get_global_grad_norm())
        skipped = not self._engine.was_step_applied()
        if self.opts.param_dtype == "fp16" and not any_rank(not finite):
            norm = norm if math.isfinite(norm) else math.inf
        elif skipped or not math.isfinite(norm):
            self._refuse(finite, norm)
        self.step_count += 1
        if self.average is not None and not skipped:
            self.average.update(self._saved_state(dist.get_rank() == 0))
        return StepStats(norm, lr, skipped)

    @property
    def _is_plain(self) -> bool:
        """ZeRO off and fp32: the optimizer is torch's own, which neither measures nor checks gradients."""
        return self.opts.zero_stage == 0 and self.opts.param_dtype == "fp32"

    def _refuse(self, finite: bool, norm: float) -> None:
        everywhere = not any_rank(not finite)
        what = f"the gradient norm is {norm}{self._broken.told()}" if everywhere else "a loss is NaN or infinite"
        raise NonFiniteError(
            f"optimizer step {self.step_count + 1}: {what}; the step was not applied and the weights are as after step "
            f"{self.step_count}. Look at the inputs of this step (log-probs, advantages, rewards), lower "
            "--learning_rate, or resume from the last checkpoint with --load_checkpoint"
        )

    def _require_training(self, what: str) -> None:
        if not self.training:
            raise RuntimeError(f"{what}() on an engine without an optimizer")
        self._require_awake(f"{what}()")

    def _require_awake(self, what: str) -> None:
        """Also on a CPU, where nothing moves: DeepSpeed computes with wrong weights meanwhile, and says nothing."""
        if self._asleep:
            raise RuntimeError(f"{what} while the model's states are offloaded: call reload_states() first")

    # ------------------------------------------------------------------------------------------------- weights out

    def parameter_meta(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and full shape of each exported weight, in the order of :meth:`gathered_parameters`."""
        return [(name, w.dtype, shape) for w in exported_weights(self.hf_model) for name, shape in w.parts()]

    def gathered_parameters(self, bucket_bytes: int = 1 << 30) -> Iterator[list[tuple[str, Tensor]]]:
        """Full weights as the model's folder has them, in buckets; all ranks must iterate to the end together.

        Tied weights come once, LoRA merged. The tensors are copies on the model's device, and stay valid. A bucket that
        the caller has emptied takes no memory while the next one is gathered.

        Args:
            bucket_bytes: most bytes in a bucket; a larger weight comes alone.
        """
        self._require_awake("gathering the weights")
        for bucket in in_buckets(exported_weights(self.hf_model), bucket_bytes):
            with whole(p for w in bucket for p in w.sources):
                tensors = [named for w in bucket for named in w.tensors()]
            yield tensors

    def save_hf(
        self,
        folder: str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config_updates: dict[str, Any] | None = None,
    ) -> None:
        """Write a Hugging Face folder (adapters only for a LoRA model). All ranks call it; rank 0 writes.

        With ``average_decay`` the weights are the averages.

        Args:
            config_updates: further entries of config.json (``mean`` and ``std`` of a reward model).

        Raises:
            DistributedError: a weight is not finite, or rank 0 could not write.
        """
        self._require_awake("saving the model")
        first = dist.get_rank() == 0
        state = self._saved_state(first)
        if self.average is not None:
            state = self.average.replaced(state)
        what = f"saving the model to {folder}"
        bad = [name for name, tensor in state.items() if not is_finite(tensor)]
        told = f"refusing to save weights that are not finite: {', '.join(bad[:5])}"
        raise_together(told if bad else "", what)
        writes = Writes(what, folder)
        if first:
            writes.run(write_hf_folder, self.hf_model, state, folder, tokenizer, config_updates)
        writes.raise_together()

    def _saved_state(self, keep: bool) -> dict[str, Tensor]:
        """Full tensors on the CPU by name; empty where ``keep`` is false (the gathering is collective)."""
        model = self.hf_model
        if is_peft(model):
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        else:
            named = list(model.named_parameters())
        state: dict[str, Tensor] = {}
        for name, parameter in named:
            with whole([parameter]):
                if keep:
                    state[name] = parameter.detach().to("cpu", copy=True)
        if keep and not is_peft(model):
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            state |= {n: b.detach().cpu() for n, b in model.state_dict().items() if n not in names}
        return state

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        root: str | Path,
        tag: str,
        client_state: dict[str, Any],
        max_num: int | None = None,
        max_mem_gib: float = math.inf,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config_updates: dict[str, Any] | None = None,
    ) -> None:
        """Write weights, optimizer, schedule, random states and ``client_state`` as ``root/tag``.

        The folder appears when it is complete; then ``latest`` is moved to it; then checkpoints beyond ``max_num``
        or ``max_mem_gib`` are removed (None = keep all), and, when the tag begins with ``best_``, the earlier best
        ones. All ranks call it.

        Args:
            tokenizer: kept for Hugging Face folders made of the checkpoint later.
            config_updates: the same of entries of their config.json; see :meth:`save_hf`.

        Raises:
            DistributedError: a rank could not write its part (earlier checkpoints are untouched), or rank 0 could not
                finish it.
        """
        self._require_training("save_checkpoint")
        root = Path(root)
        scratch = root / files.writing_tag(tag)
        first = dist.get_rank() == 0
        writes = Writes(f"writing checkpoint {root / tag}", root / tag)
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
            writes.run(scratch.mkdir, parents=True)
        barrier(f"start of checkpoint {tag}")
        writes.raise_together()
        state = {"client_state": client_state, "step_count": self.step_count}
        with writes.of_deepspeed(self._engine):
            self._engine.save_checkpoint(
                str(root),
                tag=scratch.name,
                client_state=state,
                save_latest=False,
                exclude_frozen_parameters=self._quantized,
            )
        if first and tokenizer is not None:
            writes.run(save_tokenizer, tokenizer, scratch / files.TOKENIZER)
        writes.run(torch.save, files.rng_state(), scratch / f"rng_{dist.get_rank()}.pt")
        if first and self.average is not None:
            writes.run(torch.save, self.average.weights, scratch / files.AVERAGE)
        barrier(f"end of checkpoint {tag}")
        writes.raise_together()
        if first:
            writes.run(self._finish_checkpoint, root, tag, client_state, config_updates)
            if max_num is not None:
                writes.run(files.rotate_checkpoints, root, max_num, max_mem_gib)
        writes.raise_together()

    def _finish_checkpoint(
        self, root: Path, tag: str, client_state: dict[str, Any], config_updates: dict[str, Any] | None
    ) -> None:
        best = tag.startswith(files.BEST_PREFIX)
        key, value = "best_eval_metric_key", "best_eval_metric_value"
        metric = (client_state.get(key), client_state.get(value)) if best else (None, None)
        files.finish_checkpoint(root, tag, self._meta(config_updates), metric)

    def _meta(self, config_updates: dict[str, Any] | None) -> dict[str, Any]:
        head = getattr(self.hf_model.config, "value_head_prefix", None)
        return {
            files.CONFIG: {**({"value_head_prefix": head} if head else {}), **(config_updates or {})},
            "world_size": dist.get_world_size(),
            "zero_stage": self._stage,
            "param_dtype": self.opts.param_dtype,
            "step": self.step_count,
            files.LINEAGE: self._lineage,
            "tensor_parallel_size": self.opts.ds_tensor_parallel_size,
        }

    def load_checkpoint(self, root: str | Path, tag: str | None = None) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` wrote, and return its ``client_state``. Only before training.

        Args:
            tag: None = the one that ``latest`` names.

        Raises:
            CheckpointError: nothing there, damaged, or made by another setup; see :func:`check_fit`.
        """
        self._require_training("load_checkpoint")
        name = files.LATEST_UNIVERSAL if self._universal else files.LATEST
        tag = tag or files.latest_tag(root, name)
        if tag is None:
            raise files.CheckpointError(f"{root} has no file {name!r}: there is no checkpoint to resume from")
        # of layers that ranks share, the part: so it is in the checkpoint
        trained = {
            n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in self.module.named_parameters() if p.requires_grad
        }
        opts, world = self.opts, dist.get_world_size()
        setup = Setup(world, self._stage, opts.zero_stage, opts.param_dtype, trained, opts.ds_tensor_parallel_size)
        check_fit(root, tag, setup, self._universal)
        if not self._universal:  # a converted one has no META: what goes on from it counts as another run
            self._lineage = files.read_meta(root, tag).get(files.LINEAGE)
        asked = [{k: v for k, v in g.items() if k != "params"} for g in self._engine.optimizer.param_groups]
        damaged = f"checkpoint {Path(root) / tag} is damaged or not complete, resume from another"
        try:
            path, state = self._engine.load_checkpoint(str(root), tag=tag, load_module_strict=not self._quantized)
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError, EOFError) as error:
            raise files.CheckpointError(f"{damaged}: {type(error).__name__}: {error}") from error
        if path is None:
            raise files.CheckpointError(f"{damaged}: DeepSpeed found nothing in it")
        self.step_count = int(state["step_count"])
        if self._universal:
            self._separate_steps()
        self._apply_settings(asked)
        if self.average is not None:
            self._load_average(Path(root) / tag / files.AVERAGE)
        rng = Path(root) / tag / f"rng_{dist.get_rank()}.pt"
        if rng.is_file():
            files.set_rng_state(torch.load(rng, weights_only=False))
        return dict(state["client_state"])

    def _load_average(self, path: Path) -> None:
        assert self.average is not None
        first = dist.get_rank() == 0
        self.average.weights.clear()
        if not path.is_file():
            logger.warning("%s has no moving average: it starts from the weights of the checkpoint", path.parent)
            self.average.update(self._saved_state(first))
        elif first:
            self.average.update(torch.load(path, map_location="cpu", weights_only=True))

    def _separate_steps(self) -> None:
        """DeepSpeed gives all weights of a universal checkpoint one step counter (ZeRO-3), which each would raise."""
        optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()

    def _apply_settings(self, groups: list[dict[str, Any]]) -> None:
        """After a resume, this run's flags hold (rates, decay, length of the schedule), not those of the checkpoint."""
        for group, asked in zip(self._engine.optimizer.param_groups, groups, strict=True):
            group.update(asked)
        if self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.prepare()

    # ------------------------------------------------------------------------------------------------------ sleep

    def offload_states(self) -> None:
        """Move what the device does not need while rollout engines use it to the CPU (``--deepspeed_enable_sleep``).

        Nothing moves on a CPU. With ``--adam_offload``, whose states are on the CPU already, weights do. Until
        :meth:`reload_states` everything that needs the weights is refused, everywhere.
        """
        self._asleep = True
        if not on_gpu():
            return
        if self.training:
            offload_engine(self._engine, self._stage)
        elif self._engine is not None:
            self._engine.empty_partition_cache()  # the small weights, of which ZeRO-3 keeps the whole on each rank
        if self._frozen is not None:
            self._frozen.to_cpu()
        platform.synchronize()
        platform.empty_cache()

    def reload_states(self) -> None:
        """Bring back what :meth:`offload_states` moved."""
        self._asleep = False
        if not on_gpu():
            return
        if self._frozen is not None and not self.param_offload:
            self._frozen.to_device()
        if self.training:
            self._engine.reload_states(non_blocking=True)
        platform.synchronize()
