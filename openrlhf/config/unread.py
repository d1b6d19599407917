"""Flags of train_ppo_ray that were changed although nothing reads them beside the others: told, never refused."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf.config.commands import PPOConfig
from openrlhf.config.flag import flag_specs
from openrlhf.config.options_algorithm import ESTIMATORS, WHITENED_ESTIMATORS

_CORRECTION = ("vllm_is_correction_type", "vllm_is_truncated_threshold", "vllm_is_correction_gating")


def unread_flags(cfg: PPOConfig) -> Iterator[str]:
    """A sentence for each reason; of a completed configuration."""
    specs = flag_specs(PPOConfig)
    for names, reason in (*_of_advantages(cfg), *_of_losses(cfg)):
        changed = [f"--{name}" for name in names if getattr(cfg, name) != specs[name].default]
        if changed:
            yield f"{', '.join(changed)} {'changes' if len(changed) == 1 else 'change'} nothing: {reason}"


def _of_advantages(cfg: PPOConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    estimator = cfg.advantage_estimator
    if estimator in ESTIMATORS:  # others may read what they like
        if estimator != "gae":
            yield ("lambd", "value_clip", "critic_learning_rate", "save_value_network"), f"{estimator} has no critic"
        if estimator not in WHITENED_ESTIMATORS:
            yield ("no_advantage_std_norm",), f"{estimator} does not whiten advantages"
        if estimator != "pass_at_k":
            yield ("pass_k",), "it belongs to --advantage_estimator pass_at_k"
    if cfg.overlong_buffer_len is None:
        yield ("overlong_penalty_factor",), "--overlong_buffer_len switches that penalty on"
    if cfg.kl_target is None:
        yield ("kl_horizon",), "--kl_target makes the weight of the KL adapt"
    if not cfg.use_kl_loss:
        yield ("kl_unbiased_gradient",), "it is about --use_kl_loss"


def _of_losses(cfg: PPOConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    loss = cfg.policy_loss_type
    if loss in ("cispo", "gmpo", "sapo"):
        yield ("dual_clip",), f"it bounds the ratio in ppo and gspo, not in {loss}"
    if loss == "sapo":
        own = "eps_clip" if cfg.eps_clip_low_high == (cfg.eps_clip, cfg.eps_clip) else "eps_clip_low_high"
        yield (own,), "sapo has no clip; only the metric ppo_clip_ratio is counted by it"
    if not cfg.enable_vllm_is_correction:
        yield _CORRECTION, "--enable_vllm_is_correction switches the correction on"
    elif loss == "gspo":
        yield _CORRECTION, "gspo takes its ratio against the engine's log-probs and has no weight to bound"
    if not cfg.enable_ema:
        yield ("ema_beta",), "--enable_ema keeps the average"
