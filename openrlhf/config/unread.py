"""Flags that someone changed although nothing reads them beside the others: told, never refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from openrlhf.config.commands import PPOConfig, TrainerOptions
from openrlhf.config.derive import writes_checkpoints
from openrlhf.config.flag import flag_specs, flag_value
from openrlhf.config.options_algorithm import ESTIMATORS, WHITENED_ESTIMATORS, ActorCriticOptions

_CORRECTION = ("vllm_is_correction_type", "vllm_is_truncated_threshold", "vllm_is_correction_gating")
_GSPO = "gspo takes its ratio against the engine's log-probs and has no weight to bound"
_CRITIC = tuple(name for name in flag_specs(ActorCriticOptions) if name.startswith("critic_"))
_MUON = tuple(name for name in flag_specs(PPOConfig) if name.startswith("muon_"))
_CRITIC_SIZE = ("critic_num_nodes", "critic_num_gpus_per_node")

# Flags that are read only while another one is on: that one, the flags, why.
_SWITCHES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "lora_rank",
        ("lora_alpha", "lora_dropout", "target_modules"),
        "--lora_rank 0 trains all weights, without adapters",
    ),
    (
        "gradient_checkpointing",
        ("gradient_checkpointing_every", "gradient_checkpointing_use_reentrant"),
        "--gradient_checkpointing is off",
    ),
    ("use_wandb", ("wandb_org", "wandb_group", "wandb_project"), "--use_wandb is off"),
    ("reward_pretrain", ("normalize_reward",), "only reward models have a stored mean and std"),
    ("overlong_buffer_len", ("overlong_penalty_factor",), "--overlong_buffer_len switches that penalty on"),
    ("init_kl_coef", ("use_kl_loss", "kl_target"), "--init_kl_coef 0 has no reference model"),
    ("kl_target", ("kl_horizon",), "--kl_target makes the weight of the KL adapt"),
    ("use_kl_loss", ("kl_unbiased_gradient",), "it is about --use_kl_loss"),
    ("enable_vllm_is_correction", _CORRECTION, "--enable_vllm_is_correction switches the correction on"),
    ("enable_ema", ("ema_beta",), "--enable_ema keeps the average"),
)


def unread_flags(cfg: TrainerOptions, explicit: Collection[str]) -> Iterator[str]:
    """A sentence for each reason; of a completed configuration, of which someone gave the `explicit` flags."""
    specs = flag_specs(type(cfg))
    given = {name for name in explicit if getattr(cfg, name) != specs[name].default}
    reasons = [(names, reason) for switch, names, reason in _SWITCHES if not flag_value(cfg, switch)]
    reasons += _of_training(cfg)
    if isinstance(cfg, PPOConfig):
        reasons += [*_of_advantages(cfg), *_of_losses(cfg, explicit), *_of_batches(cfg)]
        if cfg.param_dtype == "fp32":
            reasons.append((("fp32_lm_head",), "--param_dtype fp32 has no other logits"))
    for names, reason in reasons:
        changed = [f"--{name}" for name in names if name in given]
        if changed:
            yield f"{', '.join(changed)} {'changes' if len(changed) == 1 else 'change'} nothing: {reason}"
    if not isinstance(cfg, PPOConfig):
        return
    if {"eps_clip", "eps_clip_low_high"} <= set(explicit):
        yield "--eps_clip changes nothing: --eps_clip_low_high gives both sides of the range"
    if _no_weight(cfg):
        for name in sorted(given & {"use_icepop", "vllm_is_correction_level", "vllm_is_correction_mode"}):
            yield f"--{name} does no more than --enable_vllm_is_correction: {_GSPO}"


def _of_training(cfg: TrainerOptions) -> Iterator[tuple[tuple[str, ...], str]]:
    if "muon" not in (cfg.optim, flag_value(cfg, "critic_optim")):
        yield _MUON, "--optim is adam"
    if flag_value(cfg, "advantage_estimator") == "gae" and flag_value(cfg, "critic_optim") != "muon":
        yield tuple(f"critic_{name}" for name in _MUON), "--critic_optim is adam"
    if not writes_checkpoints(cfg):
        yield ("save_hf_ckpt",), "--save_steps N writes checkpoints"


def _of_batches(cfg: PPOConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if cfg.use_dynamic_batch:
        sizes = ("micro_train_batch_size", "micro_rollout_batch_size")
        yield sizes, "--use_dynamic_batch fills micro-batches up to --train_max_tokens_per_gpu"
    else:
        tokens = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
        yield tokens, "micro-batches count samples without --use_dynamic_batch"


def _of_advantages(cfg: PPOConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    estimator = cfg.advantage_estimator
    if estimator in ESTIMATORS:  # others may read what they like
        if estimator != "gae":
            sizes = tuple(name for name in _CRITIC_SIZE if getattr(cfg, name))  # 0 says that there is none
            names = ("lambd", "value_clip", "save_value_network", *_CRITIC, *sizes)
            yield names, f"{estimator} has no critic"
        if estimator not in WHITENED_ESTIMATORS:
            yield ("no_advantage_std_norm",), f"{estimator} does not whiten advantages"
        if estimator != "pass_at_k":
            yield ("pass_k",), "it belongs to --advantage_estimator pass_at_k"


def _of_losses(cfg: PPOConfig, explicit: Collection[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    loss = cfg.policy_loss_type
    if loss in ("cispo", "gmpo", "sapo"):
        yield ("dual_clip",), f"it bounds the ratio in ppo and gspo, not in {loss}"
    if loss == "sapo":
        own = "eps_clip_low_high" if "eps_clip_low_high" in explicit else "eps_clip"
        yield (own,), "sapo has no clip; only the metric ppo_clip_ratio is counted by it"
    if _no_weight(cfg):
        yield _CORRECTION, _GSPO


def _no_weight(cfg: PPOConfig) -> bool:
    """The correction is on, and no loss has its weight: gspo's own has none, and the KL's only an unbiased gradient."""
    weighted_kl = cfg.init_kl_coef > 0 and cfg.use_kl_loss and cfg.kl_unbiased_gradient
    return cfg.enable_vllm_is_correction and cfg.policy_loss_type == "gspo" and not weighted_kl
