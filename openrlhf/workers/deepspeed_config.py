"""What DeepSpeed is told: its configuration from our flags, and how quiet it is."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed

from openrlhf import platform
from openrlhf.config.options_model import DeepSpeedOptions


def deepspeed_config(opts: DeepSpeedOptions, stage: int, *, training: bool, param_offload: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. Accumulation is ours, so batch sizes are 1 and mean nothing."""
    zero: dict[str, Any] = {
        # without ZeRO, DeepSpeed has no float32 master weights; ZeRO-1 does what is wanted and partitions only them
        "stage": 1 if stage == 0 and opts.param_dtype != "fp32" else stage,
        "overlap_comm": opts.overlap_comm,
        "contiguous_gradients": opts.overlap_comm,
        "zero_hpz_partition_size": opts.zpg,
        "offload_param": {"device": "cpu" if param_offload and stage == 3 else "none"},
    }
    if training:
        offload = offloads_adam(opts)
        zero["offload_optimizer"] = {"device": "cpu" if offload else "none", "pin_memory": offload}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 40,
        "zero_optimization": zero,
        "gradient_clipping": opts.max_norm,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
    }
    if opts.param_dtype == "bf16":
        # without the check DeepSpeed applies a NaN gradient to bf16 weights
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif opts.param_dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}
    if opts.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": opts.grad_accum_dtype}
    if opts.use_ds_universal_ckpt:
        config["checkpoint"] = {"load_universal": True}
    return config


def group_second_copies(size: int) -> None:
    """Put the ranks of ``--zpg`` together, once a process: DeepSpeed has no way to where there is no optimizer."""
    from deepspeed.utils import groups

    if size > 1 and groups._get_zero_param_intra_parallel_group() is None:
        deepspeed.init_distributed(dist_init_required=False)
        groups._create_zero_param_parallel_group(size)


def on_gpu() -> bool:
    """Whether models are on a GPU."""
    return platform.device_type() == "cuda"


def offloads_adam(opts: DeepSpeedOptions) -> bool:
    """On a CPU the optimizer's state is where ``--adam_offload`` wants it already."""
    return opts.adam_offload and on_gpu()


def tame_deepspeed() -> None:
    """Only DeepSpeed's warnings, and no compiling of its CPU all-reduce at start (minutes of g++); gloo serves."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
