"""Names and values that mean the same in verl and slime: they aren't accepted, but the error says what to write."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from openrlhf.config.names import underscored
from openrlhf.config.values import FALSE_WORDS

# The left side is the other system's name, the right side what to write here; {} is the value, if any.
_VERL = {
    "actor_rollout_ref.rollout.name": "--vllm_num_engines (vLLM is the only engine, and needs no name)",
    "actor_rollout_ref.rollout.n": "--n_samples_per_prompt {}",
    "actor_rollout_ref.rollout.val_kwargs.n": "--eval_n_samples_per_prompt {}",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "--eval_temperature {}",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "--top_p {} (evaluation has none of its own)",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "--eval_temperature, with 0 for false",
    "actor_rollout_ref.rollout.temperature": "--temperature {}",
    "actor_rollout_ref.rollout.top_p": "--top_p {}",
    "actor_rollout_ref.rollout.top_k": "--top_k {}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--vllm_tensor_parallel_size {}",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "--vllm_gpu_memory_utilization {}",
    "actor_rollout_ref.rollout.enforce_eager": "--enforce_eager",
    "actor_rollout_ref.rollout.enable_prefix_caching": "--enable_prefix_caching",
    "actor_rollout_ref.rollout.max_num_seqs": "--vllm_max_num_seqs {}",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "--vllm_max_num_batched_tokens {}",
    "actor_rollout_ref.rollout.max_model_len": "--max_len {}",
    "actor_rollout_ref.rollout.multi_turn.enable": "--agent_func_path with a .py file that plays the turns",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "--micro_rollout_batch_size {}",
    "actor_rollout_ref.model.path": "--pretrain {}",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "--gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": "--packing_samples",
    "actor_rollout_ref.model.lora_rank": "--lora_rank {}",
    "actor_rollout_ref.actor.optim.lr": "--actor_learning_rate {}",
    "actor_rollout_ref.actor.optim.weight_decay": "--l2 {}",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "--lr_warmup_ratio {}",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "--deepspeed_enable_sleep",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "--deepspeed_enable_sleep",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "--ref_offload",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "--policy_loss_type {}",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "--micro_train_batch_size with {} / GPUs (it is one GPU's)",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "--train_batch_size with {} x n_samples_per_prompt (it counts samples, not prompts)"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--micro_train_batch_size {}",
    "actor_rollout_ref.actor.ppo_epochs": "--max_epochs {}",
    "actor_rollout_ref.actor.clip_ratio": "--eps_clip {}",
    "actor_rollout_ref.actor.clip_ratio_low": "--eps_clip_low_high {} HIGH",
    "actor_rollout_ref.actor.clip_ratio_high": "--eps_clip_low_high LOW {}",
    "actor_rollout_ref.actor.clip_ratio_c": "--dual_clip {}",
    "actor_rollout_ref.actor.entropy_coeff": "--entropy_loss_coef {}",
    "actor_rollout_ref.actor.use_kl_loss": "--use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef": "--use_kl_loss --init_kl_coef {}",
    "actor_rollout_ref.actor.kl_loss_type": "--kl_estimator {}",
    "actor_rollout_ref.actor.loss_agg_mode": "--loss_agg_mode {}",
    "actor_rollout_ref.actor.use_dynamic_bsz": "--use_dynamic_batch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "--train_max_tokens_per_gpu {}",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "--ring_attn_size {}",
    "actor_rollout_ref.actor.grad_clip": "--max_norm {}",
    "critic.model.path": "--critic_pretrain {}",
    "critic.optim.lr": "--critic_learning_rate {}",
    "critic.cliprange_value": "--value_clip {}",
    "algorithm.adv_estimator": "--advantage_estimator {}",
    "algorithm.gamma": "--gamma {}",
    "algorithm.lam": "--lambd {}",
    "algorithm.kl_ctrl.kl_coef": "--init_kl_coef {}",
    "algorithm.kl_ctrl.target_kl": "--kl_target {}",
    "algorithm.kl_ctrl.horizon": "--kl_horizon {}",
    "algorithm.use_kl_in_reward": "--init_kl_coef above 0 without --use_kl_loss",
    "algorithm.norm_adv_by_std_in_grpo": "--advantage_estimator group_norm, or dr_grpo for false",
    "algorithm.filter_groups.enable": "--dynamic_filtering",
    "algorithm.filter_groups.max_num_gen_batches": "--dynamic_filtering_max_rounds {}",
    "data.train_files": "--prompt_data {}",
    "data.val_files": "--eval_dataset {}",
    "data.train_batch_size": "--rollout_batch_size {} (it counts prompts)",
    "data.prompt_key": "--input_key {}",
    "data.seed": "--seed {}",
    "data.truncation": "--prompt_overlong cut, which keeps a prompt's end (left)",
    "data.max_prompt_length": "--prompt_max_len {}",
    "data.max_response_length": "--max_new_tokens {}",
    "data.filter_overlong_prompts": "--prompt_overlong drop",
    "trainer.total_epochs": "--num_episodes {}",
    "trainer.total_training_steps": "--max_steps {}",
    "trainer.resume_mode": "--load_checkpoint for auto, and nothing for disable",
    "trainer.max_actor_ckpt_to_keep": "--max_ckpt_num {}",
    "trainer.save_freq": "--save_steps {}",
    "trainer.test_freq": "--eval_steps {}",
    "trainer.default_local_dir": "--ckpt_path {}",
    "trainer.project_name": "--wandb_project {}",
    "trainer.experiment_name": "--wandb_run_name {}",
    "trainer.nnodes": "--actor_num_nodes {}",
    "trainer.n_gpus_per_node": "--actor_num_gpus_per_node {}",
    "trainer.rollout_data_dir": "--dump_rollouts {}",
    "trainer.val_before_train": "--eval_before_train",
    "trainer.logger": "--use_wandb KEY or --use_tensorboard FOLDER",
    "reward_model.enable": "--reward_pretrain with a reward model, and nothing for false",
    **{
        f"reward_model.{buffer}.{name}": text
        for buffer in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for name, text in (
            ("enable", "--overlong_buffer_len with a number of tokens, and nothing for false"),
            ("len", "--overlong_buffer_len {}"),
            ("penalty_factor", "--overlong_penalty_factor {}"),
        )
    },
    "reward_model.model.path": "--reward_pretrain {}",
    "custom_reward_function.path": "--remote_rm_url {} (a .py file that defines reward_func)",
    "custom_reward_function.name": "--remote_rm_url with a .py file in which the function is called reward_func",
}
_SLIME = {
    "hf_checkpoint": "--pretrain {}",
    "ref_load": "--pretrain {} (the reference model is the one that the policy starts from)",
    "rollout_function_path": "--custom_generate_function_path with a function that plays one episode",
    "over_sampling_batch_size": "--vllm_generate_batch_size {}",
    "rollout_num_gpus": "--vllm_num_engines with {} / vllm_tensor_parallel_size",
    "sglang_mem_fraction_static": "--vllm_gpu_memory_utilization {}",
    "custom_loss_function_path": "--custom_algorithms with a .py file that registers the loss",
    "optimizer": "--optim {}",
    "wandb_key": "--use_wandb {}",
    "wandb_team": "--wandb_org {}",
    "rm_type": "--remote_rm_url with a .py file that defines reward_func, or builtin:math or builtin:exact_match",
    "rm_url": "--remote_rm_url {}",
    "rollout_max_response_len": "--max_new_tokens {}",
    "rollout_max_prompt_len": "--prompt_max_len {}",
    "rollout_top_k": "--top_k {}",
    "rollout_stop": "--stop_strings {}",
    "rollout_stop_token_ids": "--stop_token_ids {}",
    "debug_rollout_only": "--rollout_only with --dump_rollouts FOLDER",
    "save_debug_rollout_data": "--dump_rollouts with a folder",
    "load_debug_rollout_data": "--load_rollouts with a folder",
    "global_batch_size": "--train_batch_size {}",
    "micro_batch_size": "--micro_train_batch_size {}",
    "num_epoch": "--num_episodes {}",
    "num_rollout": "--max_steps {}",
    "num_steps_per_rollout": "--train_batch_size with rollout_batch_size x n_samples_per_prompt / {}",
    "eval_prompt_data": "--eval_dataset with name=path, and commas between several",
    "n_samples_per_eval_prompt": "--eval_n_samples_per_prompt {}",
    "eval_interval": "--eval_steps {}",
    "save_interval": "--save_steps {}",
    "save": "--ckpt_path {}",
    "load": "--load_checkpoint with --ckpt_path {}",
    "lr": "--actor_learning_rate {}",
    "clip_grad": "--max_norm {}",
    "weight_decay": "--l2 {}",
    "eps_clip_high": "--eps_clip_low_high LOW {}",
    "kl_coef": "--init_kl_coef {}",
    "kl_loss_coef": "--use_kl_loss --init_kl_coef {}",
    "kl_loss_type": "--kl_estimator {}",
    "entropy_coef": "--entropy_loss_coef {}",
    "use_tis": "--enable_vllm_is_correction",
    "tis_clip": "--vllm_is_truncated_threshold LOW {}",
    "calculate_per_token_loss": "--loss_agg_mode token-mean (the default)",
    "colocate": "--colocate_all_models",
    "rollout_num_gpus_per_engine": "--vllm_tensor_parallel_size {}",
    "max_tokens_per_gpu": "--train_max_tokens_per_gpu {}",
    "use_dynamic_batch_size": "--use_dynamic_batch",
    "context_parallel_size": "--ring_attn_size {}",
    "tensor_model_parallel_size": "--ds_tensor_parallel_size {}",
    "check_weight_update_equal": "--check_weight_sync",
    "rollout_seed": "--seed {}",
    "tb_project_name": "--use_tensorboard FOLDER",
}
# Values of flags: what stands there, and what it is here.
_VALUES = {
    "advantage_estimator": {
        "grpo": "group_norm",
        "reinforce_plus_plus": "reinforce",
        "reinforce++": "reinforce",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
        "reinforce++_baseline": "reinforce_baseline",
        "ppo": "gae",
        "grpo_passk": "pass_at_k",
        "gspo": "group_norm with --policy_loss_type gspo",
    },
    "kl_estimator": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    "policy_loss_type": {"vanilla": "ppo"},
    "optim": {"adamw": "adam"},
}
# What to write where the value is false and that isn't simply left out.
WHEN_FALSE = {
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "--eval_temperature 0",
    "algorithm.use_kl_in_reward": "--init_kl_coef 0, or --use_kl_loss for a KL in the loss",
    "algorithm.norm_adv_by_std_in_grpo": "--advantage_estimator dr_grpo",
    "calculate_per_token_loss": "--loss_agg_mode seq-mean-token-mean",
}
_FALSE_TABLE = {underscored(name): text for name, text in WHEN_FALSE.items()}
_SYSTEMS = {"verl": _VERL, "slime": _SLIME}
_TABLE = {underscored(name): (system, text) for system, table in _SYSTEMS.items() for name, text in table.items()}


def translations() -> list[tuple[str, str, str]]:
    """The whole table: system, name there, what to write here ({} stands for the value)."""
    return [(system, name, text) for system, table in _SYSTEMS.items() for name, text in table.items()]


def value_translations() -> list[tuple[str, str, str]]:
    """The table of values: flag, value elsewhere, value here."""
    return [(flag, value, here) for flag, values in _VALUES.items() for value, here in values.items()]


def value_here(flag: str, value: str) -> str | None:
    """What a value that a flag doesn't have is called here; None if it isn't known."""
    return _VALUES.get(flag, {}).get(underscored(value.lower()))


class Translation(NamedTuple):
    """What a foreign name is here.

    Attributes:
        system: where the name comes from.
        advice: what to write instead.
        fits: whether the command has the flags that the advice speaks of.
    """

    system: str
    advice: str
    fits: bool


def translate(name: str, value: str | None, flags: Collection[str]) -> Translation | None:
    """What a foreign name is here; None if it isn't known.

    Args:
        name: the name as written, without leading dashes or plus signs.
        value: the value written with it, if any; it appears in the advice.
        flags: those that the command has.
    """
    name = underscored(name)
    if name not in _TABLE:
        return None
    system, text = _TABLE[name]
    advised = re.findall(r"--(\w+)", text)
    if "{}" not in text and (value or "").lower() in FALSE_WORDS:
        left_out = f"{text}, to be left out for {value}" if text == f"--{advised[0]}" else "nothing: leave it out"
        advice = _FALSE_TABLE.get(name, left_out)
    else:
        value = value and (value_here(advised[0], value) or value)
        advice = text.replace("{}", value or "VALUE")
    fits = set(re.findall(r"--(\w+)", advice)) <= set(flags)
    return Translation(system, advice if fits else f"{advice}, in train_ppo_ray", fits)
