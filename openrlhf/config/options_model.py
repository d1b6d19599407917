"""Option groups shared by all commands that load or train a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from openrlhf.config.flag import OptionGroup, flag


def model_flag(default: Any, help: str, name: str, under: str = "", **declared: Any) -> Any:
    """A flag that dotted releases have twice: below `under` for the one model of a command, and for the PPO actor."""
    return flag(default, help, under + name, f"actor.{name}", **declared)


@dataclass(kw_only=True)
class PrecisionOptions(OptionGroup):
    title: ClassVar[str] = "Model"

    param_dtype: str = flag(
        "bf16",
        "number format of weights and compute; engines and trainers always share it",
        "ds.param_dtype",
        choices=("bf16", "fp16", "fp32"),
    )


@dataclass(kw_only=True)
class LoadOptions(PrecisionOptions):
    attn_implementation: str = flag(
        "auto",
        "attention backend; auto is this project's packed attention on the best kernel of the device, "
        "anything else is a name that transformers knows (eager, sdpa, flash_attention_2, a hub kernel)",
        "ds.attn_implementation",
    )
    load_in_4bit: bool = flag(
        False,
        "load the base weights of every model as NF4 and compute in bf16; --lora_rank trains adapters on them (QLoRA)",
        "ds.load_in_4bit",
    )
    disable_fast_tokenizer: bool = flag(
        False, "use the tokenizer that is written in Python", "data.disable_fast_tokenizer"
    )
    packing_samples: bool = flag(False, "run every micro-batch as one sequence without padding", "ds.packing_samples")
    use_ms: bool = flag(False, "download models and data from ModelScope", "use_ms")
    experts_implementation: str | None = flag(
        None,
        "kernel for mixture-of-experts layers; grouped_mm, what transformers chooses, if not given",
        "ds.experts_implementation",
        choices=("eager", "batched_mm", "grouped_mm", "deepgemm"),
        since="0.11",
    )


@dataclass(kw_only=True)
class ModelOptions(LoadOptions):
    pretrain: str | None = model_flag(
        None, "model to train: a local folder or a hub id", "model_name_or_path", under="model."
    )
    gradient_checkpointing: bool = model_flag(
        False,
        "recompute activations in the backward pass to save memory",
        "gradient_checkpointing_enable",
        under="model.",
    )
    gradient_checkpointing_every: int = flag(
        1,
        "recompute every n-th layer only: with 2 half of the layers keep their activations, for more speed while "
        "memory lasts",
        since="new",
    )
    gradient_checkpointing_use_reentrant: bool = model_flag(
        False,
        "use PyTorch's re-entrant activation checkpointing; not with --aux_loss_coef",
        "gradient_checkpointing_reentrant",
        under="model.",
    )
    use_liger_kernel: bool = flag(False, "use the kernels of the liger-kernel package", "ds.use_liger_kernel")
    aux_loss_coef: float = model_flag(
        0.0,
        "weight of the router balancing loss of mixture-of-experts models; 0 leaves it out",
        "aux_loss_coef",
        under="model.",
    )
    lora_rank: int = flag(0, "rank of the LoRA adapters; 0 trains all weights", "ds.lora.rank")
    lora_alpha: int = flag(16, "LoRA scale: the update is multiplied by alpha / rank", "ds.lora.alpha")
    lora_dropout: float = flag(0.0, "dropout on the input of the adapters", "ds.lora.dropout")
    target_modules: list[str] = flag(
        ["all-linear"],
        "names of the modules that get an adapter; all-linear means every linear layer but the head",
        "ds.lora.target_modules",
    )

    @property
    def model_path(self) -> str:
        """`pretrain`, which the rules require every training command to have."""
        assert self.pretrain is not None
        return self.pretrain


@dataclass(kw_only=True)
class ValueHeadOptions(OptionGroup):
    title: ClassVar[str] = "Model"

    value_head_prefix: str = flag(
        "score",
        "name of the scalar head; a value_head_prefix in the model's config.json wins over it",
        "ds.value_head_prefix",
    )


@dataclass(kw_only=True)
class DeepSpeedOptions(PrecisionOptions):
    title: ClassVar[str] = "DeepSpeed and parallelism"

    zero_stage: int = flag(2, "ZeRO stage, 0 to 3", "ds.zero_stage")
    zpg: int = flag(1, "size of the groups in which ZeRO++ keeps a second partition (ZeRO-3)", "ds.zpg")
    adam_offload: bool = flag(False, "keep the optimizer state in CPU memory", "ds.adam_offload")
    overlap_comm: bool = flag(False, "reduce gradients while the backward pass still runs", "ds.overlap_comm")
    grad_accum_dtype: str | None = flag(
        None,
        "number format in which gradients are accumulated; DeepSpeed's choice if not given",
        "ds.grad_accum_dtype",
        choices=("bf16", "fp16", "fp32"),
    )
    deepcompile: bool = flag(
        False,
        "compile the training engine with DeepCompile",
        "ds.deepcompile",
        no_effect="it only made training faster, and nothing is compiled here",
    )
    ds_tensor_parallel_size: int = flag(
        1,
        "ranks that share each layer (DeepSpeed AutoTP)",
        "ds.tensor_parallel_size",
    )
    ring_attn_size: int = flag(
        1, "ranks that share each sequence (Ulysses sequence parallelism); divides the heads", "ds.ring_attn_size"
    )
    ring_head_stride: int = flag(
        1,
        "heads that pass a ring at a time",
        "ds.ring_attn_head_stride",
        no_effect="it only tuned the speed of a ring, and here ranks exchange all heads at once",
    )
    max_norm: float = model_flag(
        1.0, "largest gradient norm, longer gradients are scaled down; 0 never clips", "max_norm"
    )
    seed: int = flag(42, "seed of everything random", "train.seed")
    full_determinism: bool = flag(
        False,
        "use deterministic kernels, at some cost in speed; vLLM has them on GPUs only",
        "train.full_determinism_enable",
    )
    local_rank: int = flag(-1, "set by the deepspeed launcher", "local_rank")
    use_ds_universal_ckpt: bool = flag(
        False, "resume from a checkpoint in DeepSpeed's universal format", "ds.use_universal_ckpt"
    )


@dataclass(kw_only=True)
class EngineModelOptions(ModelOptions, DeepSpeedOptions):
    """What decides how a model is loaded, and how an engine runs it."""


@dataclass(kw_only=True)
class OptimizerOptions(OptionGroup):
    title: ClassVar[str] = "Optimizer"

    l2: float = model_flag(
        0.0, "weight decay, not through the gradient; biases and norm weights are exempt", "adam.weight_decay"
    )
    adam_betas: tuple[float, float] = model_flag((0.9, 0.95), "decay rates of Adam's two moments", "adam.betas")
    adam_eps: float = model_flag(1e-8, "epsilon of Adam", "adam.eps", since="0.11")
    lr_scheduler: str = model_flag(
        "cosine_with_min_lr", "learning-rate schedule, by its transformers name", "lr_scheduler"
    )
    lr_warmup_ratio: float = model_flag(
        0.03, "share of all optimizer steps that warm up, rounded up", "lr_warmup_ratio"
    )
    min_lr_ratio: float = model_flag(
        0.1, "last learning rate of the *_with_min_lr schedules, as a share of the peak", "min_lr_ratio"
    )
    optim: str = model_flag(
        "adam",
        "adam is AdamW; muon trains the hidden matrices with Muon and embeddings, heads, norms and biases with AdamW",
        "optim",
        choices=("adam", "muon"),
        since="0.11",
    )
    muon_lr: float = model_flag(0.02, "learning rate of the matrices under Muon", "muon.lr", since="0.11")
    muon_momentum: float = model_flag(0.95, "momentum of Muon", "muon.momentum", since="0.11")
    muon_ns_steps: int = model_flag(5, "Newton-Schulz steps of Muon", "muon.ns_steps", since="0.11")
    muon_nesterov: bool = model_flag(
        True,
        "Nesterov momentum in Muon",
        "muon.nesterov",
        negated=("muon.no_nesterov", "actor.muon.no_nesterov"),
        since="0.11",
    )


@dataclass(kw_only=True)
class TrainOptions(OptionGroup):
    title: ClassVar[str] = "Batches and duration"

    train_batch_size: int = flag(128, "samples of one optimizer step, over all ranks", "train.batch_size")
    micro_train_batch_size: int = flag(
        8, "samples of one forward and backward pass on one rank", "train.micro_batch_size"
    )
    max_epochs: int = flag(1, "passes over the training data (PPO: over each rollout)", "train.max_epochs")
    max_steps: int = flag(
        -1,
        "stop after this many global steps: optimizer steps, in PPO rollouts; -1 sets no limit",
        since="new",
    )


@dataclass(kw_only=True)
class CheckpointOptions(OptionGroup):
    title: ClassVar[str] = "Checkpoints"

    save_path: str = flag(
        "./ckpt", "folder for the final model and tokenizer, in Hugging Face format", "ckpt.output_dir"
    )
    ckpt_path: str = flag("./ckpt/checkpoints", "folder for checkpoints to resume from", "ckpt.path")
    save_steps: int = flag(-1, "write a checkpoint every N global steps; -1 never does", "ckpt.save_steps")
    max_ckpt_num: int = flag(3, "checkpoints to keep; older ones are removed", "ckpt.max_num")
    max_ckpt_mem: float = flag(math.inf, "GiB that all checkpoints together may take", "ckpt.max_mem")
    load_checkpoint: bool = flag(
        False, "resume from the newest checkpoint in ckpt_path, if there is one", "ckpt.load_enable"
    )
    save_hf_ckpt: bool = flag(
        False,
        "also write each checkpoint's model in Hugging Face format, a folder ending in _hf; PPO keeps all of them, "
        "whatever max_ckpt_num is, other commands remove them with their checkpoints",
        "ckpt.save_hf",
    )
    disable_ds_ckpt: bool = flag(
        False, "leave out the part of each checkpoint that training resumes from", "ckpt.disable_ds"
    )


@dataclass(kw_only=True)
class LoggingOptions(OptionGroup):
    title: ClassVar[str] = "Logging"

    logging_steps: int = flag(1, "log metrics every N global steps", "logger.logging_steps")
    run_dir: str | None = flag(
        None, "folder for metrics.jsonl and the processes' logs; ckpt_path/run if not given", since="new"
    )
    use_wandb: str | None = flag(
        None,
        "Weights & Biases API key; any text switches it on, and where you are logged in the key isn't used",
        "logger.wandb.key",
        secret=True,
    )
    wandb_org: str | None = flag(None, "Weights & Biases entity", "logger.wandb.org")
    wandb_group: str | None = flag(None, "Weights & Biases group", "logger.wandb.group")
    wandb_project: str = flag("openrlhf", "Weights & Biases project", "logger.wandb.project")
    wandb_run_name: str | None = flag(
        None,
        "name of the run, also TensorBoard's sub-folder; command and start time if not given",
        "logger.wandb.run_name",
    )
    use_tensorboard: str | None = flag(None, "folder for TensorBoard files", "logger.tensorboard_dir")

    @property
    def run_folder(self) -> str:
        """`run_dir`, which normalizing fills in."""
        assert self.run_dir is not None
        return self.run_dir
