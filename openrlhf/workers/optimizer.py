"""The optimizer, AdamW or Muon with AdamW, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from openrlhf import platform
from openrlhf.config.commands import TrainerOptions
from openrlhf.models.partition import full_shape
from openrlhf.workers.muon import MuonSpec, MuonWithAdamW, hidden_matrices

_MIN_LR_SCHEDULERS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW (https://arxiv.org/abs/1711.05101). Biases and norm weights are not decayed.

    With ``muon``, that trains the hidden matrices, and AdamW the rest.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon: MuonSpec | None = None


def optimizer_spec(cfg: TrainerOptions, lr: float) -> OptimizerSpec:
    """The optimizer that the flags describe, with AdamW's peak learning rate."""
    muon = None
    if cfg.optim == "muon":
        dtype = torch.float32 if cfg.param_dtype == "fp32" else torch.bfloat16
        muon = MuonSpec(cfg.muon_lr, cfg.muon_momentum, cfg.muon_ns_steps, cfg.muon_nesterov, dtype)
    return OptimizerSpec(lr, cfg.adam_betas, cfg.adam_eps, cfg.l2, muon)


@dataclass(frozen=True)
class SchedulerSpec:
    """Learning rate over the run.

    Attributes:
        name: a transformers scheduler, one of :data:`openrlhf.config.limits.SCHEDULERS`.
        total_steps: optimizer steps of the whole run; the schedule's last value is that of the last step.
        warmup_ratio: share of the steps with a rising rate, rounded up.
        min_lr_ratio: last rate as a fraction of the highest (schedulers with ``min_lr`` in their name).
    """

    name: str
    total_steps: int
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.1


def parameter_groups(
    model: nn.Module, weight_decay: float, without: Collection[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters in two groups; the one-dimensional ones (biases, norms) without weight decay."""
    trainable = [p for p in model.parameters() if p.requires_grad and p not in without]
    groups = [
        {"params": [p for p in trainable if len(full_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, spec: OptimizerSpec, offload: bool) -> torch.optim.Optimizer:
    """The optimizer of a model's trainable parameters. With Muon, its groups come last.

    Args:
        offload: states and update on the CPU (``--adam_offload``), by DeepSpeed's vectorised C++ kernel.

    Raises:
        RuntimeError: nothing is trainable, or the C++ kernel can't be compiled.
    """
    chosen = hidden_matrices(model) if spec.muon is not None else set()
    matrices = [p for p in model.parameters() if p.requires_grad and p in chosen]
    groups = parameter_groups(model, spec.weight_decay, chosen)
    if not groups and not matrices:
        raise RuntimeError("the model has no trainable parameter")
    if spec.muon is not None and matrices:
        adamw = _adamw(groups, spec) if groups else None
        muon = {"params": matrices, "lr": spec.muon.lr, "weight_decay": spec.weight_decay, "muon": True}
        return MuonWithAdamW([*({**g, "muon": False} for g in groups), muon], spec.muon, adamw)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        try:
            return DeepSpeedCPUAdam(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, adamw_mode=True)
        except (RuntimeError, OSError, ImportError) as error:
            raise RuntimeError(
                f"--adam_offload compiles DeepSpeed's CPU Adam at first use, and that failed; it needs g++ and ninja "
                f"({error})"
            ) from error
    return _adamw(groups, spec)


def _adamw(groups: list[dict[str, Any]], spec: OptimizerSpec) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=platform.fused_optimizer())


def schedule(spec: SchedulerSpec, lr: float) -> Callable[[float], float]:
    """Factor of the learning rate for optimizer step 1, 2, ... and places between them.

    Step ``total_steps`` and every later one get the schedule's last value; the first step of a warm-up is not zero. A
    run of one step has the peak rate, and so has the last step of a warm-up that takes the whole run.
    """
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    total = max(1, spec.total_steps)
    warmup = math.ceil(spec.warmup_ratio * total)
    extra = {"min_lr_rate": spec.min_lr_ratio} if spec.name in _MIN_LR_SCHEDULERS else None
    (factor,) = get_scheduler(spec.name, probe, warmup, total, extra).lr_lambdas
    # transformers counts this one from 1 by itself.
    ahead = 1 if spec.name == "cosine_warmup_with_min_lr" else 0

    def at(step: float) -> float:
        step = min(step, total)
        # After such a warm-up transformers has no steps left: some schedules give 0 there, or divide by their number.
        return 1.0 if step == warmup or total == 1 else float(factor(step - ahead))

    return at


class Schedule:
    """The rates of an optimizer's parameter groups: its peak rates times a factor of the steps that are done.

    An optimizer step may stand for less or more than one step of the schedule (:meth:`prepare`).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[float], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.done = 0.0
        self.prepare()

    def prepare(self, progress: float = 1.0) -> None:
        """Set the rates of the next optimizer step, which takes the schedule ``progress`` steps on."""
        self._next = self.done + progress
        if abs(self._next - round(self._next)) < 1e-6:  # parts of a step add up to whole ones
            self._next = float(round(self._next))
        factor = self.factor(self._next)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """The optimizer step was taken."""
        self.done = self._next
        self.prepare()

    def state_dict(self) -> dict[str, float]:
        """The place in the schedule; rates and length are those of the run's flags."""
        return {"done": self.done}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where another run was, also one that was saved from a scheduler of torch."""
        self.done = float(state["done"] if "done" in state else state["last_epoch"])
        self.prepare()


def build_scheduler(optimizer: torch.optim.Optimizer, spec: SchedulerSpec, lr: float) -> Schedule:
    """The schedule of an optimizer whose peak rate is ``lr``."""
    return Schedule(optimizer, schedule(spec, lr))
