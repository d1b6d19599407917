"""The range of every number on its own, as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openrlhf.config.flag import flag_value
from openrlhf.config.options_algorithm import FOLLOWS
from openrlhf.config.problems import Violation
from openrlhf.config.values import show_value

# Schedules that need nothing but the flags that exist for them.
SCHEDULERS = (
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "cosine",
    "cosine_with_restarts",
    "linear",
    "polynomial",
    "inverse_sqrt",
    "constant",
    "constant_with_warmup",
)


@dataclass(frozen=True)
class Limit:
    """An interval, closed or open at its ends, and single values allowed beside it."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    also: tuple[float, ...] = ()

    def __contains__(self, number: float) -> bool:
        if number in self.also:
            return True
        above = number > self.low if self.low_open else number >= self.low
        below = number < self.high if self.high_open else number <= self.high
        return above and below

    def __str__(self) -> str:
        if -math.inf < self.low and self.high < math.inf and not (self.low_open or self.high_open):
            return f"from {self.low:g} to {self.high:g}"
        parts = []
        if self.low > -math.inf:
            parts.append(f"above {self.low:g}" if self.low_open else f"{self.low:g} or more")
        if self.high < math.inf:
            parts.append(f"below {self.high:g}" if self.high_open else f"{self.high:g} or less")
        text = " and ".join(parts)
        return " or ".join([text, *(f"{number:g}" for number in self.also)])


POSITIVE = Limit(0, low_open=True)
NOT_NEGATIVE = Limit(0)
COUNT = Limit(1)
COUNT_OR_OFF = Limit(1, also=(-1,))
SHARE = Limit(0, 1)
SHARE_BELOW_ONE = Limit(0, 1, high_open=True)

LIMITS: dict[str, Limit] = {
    **dict.fromkeys(
        (
            "train_batch_size micro_train_batch_size max_epochs max_samples max_len logging_steps "
            "max_ckpt_num gradient_checkpointing_every zpg "
            "ds_tensor_parallel_size ring_attn_size ring_head_stride lora_alpha "
            "muon_ns_steps actor_num_nodes actor_num_gpus_per_node vllm_num_engines "
            "vllm_tensor_parallel_size vllm_max_num_seqs vllm_max_num_batched_tokens "
            "n_samples_per_prompt max_new_tokens generate_max_len prompt_max_len num_episodes "
            "rollout_batch_size vllm_generate_batch_size micro_rollout_batch_size train_max_tokens_per_gpu "
            "rollout_max_tokens_per_gpu async_queue_size dynamic_filtering_max_rounds "
            "eval_n_samples_per_prompt pass_k batch_size critic_muon_ns_steps workers queue_size max_body_mib "
            "convert_workers worst_rows best_of_n tp_size max_num_seqs micro_batch_size"
        ).split(),
        COUNT,
    ),
    **dict.fromkeys(("save_steps", "eval_steps", "max_steps"), COUNT_OR_OFF),
    **dict.fromkeys(
        (
            "learning_rate actor_learning_rate critic_learning_rate muon_lr critic_muon_lr adam_eps "
            "critic_adam_eps temperature max_ckpt_mem kl_target kl_horizon value_clip beta start_timeout "
            "rollout_timeout vllm_kv_cache_gib dump_max_gib overlong_buffer_len repetition_penalty"
        ).split(),
        POSITIVE,
    ),
    **dict.fromkeys(
        (
            "l2 critic_l2 max_norm critic_max_norm aux_loss_coef lora_rank dataloader_num_workers "
            "init_kl_coef nll_loss_coef desirable_loss_weight undesirable_loss_weight "
            "eval_temperature overlong_penalty_factor max_images_per_prompt seed iter "
            "resume_step consumed_samples critic_num_nodes critic_num_gpus_per_node ref_num_nodes "
            "ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node"
        ).split(),
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(
        ("lr_warmup_ratio critic_lr_warmup_ratio min_lr_ratio critic_min_lr_ratio gamma lambd").split(), SHARE
    ),
    **dict.fromkeys(
        "adam_betas critic_adam_betas lora_dropout ema_beta muon_momentum critic_muon_momentum".split(), SHARE_BELOW_ONE
    ),
    "zero_stage": Limit(0, 3),
    "eps_clip": Limit(0, 1, low_open=True, high_open=True),
    "dual_clip": Limit(1, low_open=True),
    "label_smoothing": Limit(0, 0.5, high_open=True),
    "top_p": Limit(0, 1, low_open=True),
    "top_k": Limit(1, also=(-1, 0)),
    "min_p": SHARE,
    "stop_token_ids": NOT_NEGATIVE,
    "vllm_gpu_memory_utilization": Limit(0, 1, low_open=True),
    "stop_properly_penalty_coef": Limit(high=1),
    "freezing_actor_steps": Limit(-1),
    "port": Limit(0, 65535),
}
MAY_BE_INFINITE = {"max_ckpt_mem"}


def check_limits(cfg: Any) -> Iterator[Violation]:
    """The numbers out of range, the pairs the wrong way round, and unknown schedules."""
    for flag, limit in LIMITS.items():
        value = flag_value(cfg, flag)
        if value is None or _follows(cfg, flag, value):
            continue
        numbers = value if isinstance(value, tuple | list) else (value,)
        wrong = [n for n in numbers if n not in limit or (math.isinf(n) and flag not in MAY_BE_INFINITE)]
        if wrong:
            yield Violation(flag, f"is {show_value(value)}", f"must be {limit}")
    for flag in ("lr_scheduler", "critic_lr_scheduler"):
        name = flag_value(cfg, flag)
        if name is not None and name not in SCHEDULERS and not _follows(cfg, flag, name):
            yield Violation(flag, f"there is no schedule {name}", f"one of {', '.join(SCHEDULERS)}")
    for flag in ("reward_clip_range", "dynamic_filtering_reward_range", "vllm_is_truncated_threshold"):
        pair = flag_value(cfg, flag)
        if pair is not None and not pair[0] < pair[1]:
            fix = f"write --{flag} LOW HIGH with LOW below HIGH"
            yield Violation(flag, f"{show_value(pair)} is an empty range", fix)
    clip = flag_value(cfg, "eps_clip_low_high")
    if clip is not None and not (0 < clip[0] < 1 and clip[1] > 0) and cfg.eps_clip in LIMITS["eps_clip"]:
        yield Violation(
            "eps_clip_low_high",
            f"{show_value(clip)}: the ratio is clipped to 1 - LOW and 1 + HIGH",
            "both must be above 0, and LOW below 1",
        )
    threshold = flag_value(cfg, "vllm_is_truncated_threshold")
    if threshold is not None and threshold[0] < 0:
        problem = f"{show_value(threshold)}: ratios of probabilities are never negative"
        yield Violation("vllm_is_truncated_threshold", problem, "use a lower bound of 0 or more")


def _follows(cfg: Any, flag: str, value: Any) -> bool:
    """Whether it has the value of another flag, of which alone it is told then."""
    return flag in FOLLOWS and flag_value(cfg, FOLLOWS[flag]) == value
