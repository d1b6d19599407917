"""Automatic changes: values that follow from others, and combinations that are put right with a note."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from openrlhf.config.commands import BatchInferenceConfig, DPOConfig, PPOConfig, RMConfig, ServeRMConfig, TrainerOptions
from openrlhf.config.datasource import parse_sources
from openrlhf.config.derive import data_copies, sharing_roles
from openrlhf.config.flag import flag_specs, flag_value
from openrlhf.config.options_algorithm import FOLLOWS, GROUP_ESTIMATORS, SEQUENCE_LOSSES
from openrlhf.config.options_data import DataOptions
from openrlhf.config.options_model import DeepSpeedOptions
from openrlhf.config.options_ppo import NO_METRIC
from openrlhf.config.unread import unread_flags
from openrlhf.config.values import show_value

# The limits that train_ppo_ray had in the releases with --prompt_max_len and --generate_max_len.
OLD_PROMPT_MAX_LEN = 1024
OLD_GENERATE_MAX_LEN = 1024
# In these, a discount other than 1 has no meaning: a response has one reward, compared within a group.
UNDISCOUNTED_ESTIMATORS = (*GROUP_ESTIMATORS, "flash_reinforce", "remax")
CORRECTION_TYPES = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}
# Flags of files and folders, also lists of them (``name=path, path``). A shell expands a ~ only where a word begins.
PATH_FLAGS = (
    *("pretrain", "ref_pretrain", "reward_pretrain", "critic_pretrain", "model_path", "lora_path"),
    *("dataset", "eval_dataset", "prompt_data", "load_rollouts", "dump_rollouts"),
    *("save_path", "ckpt_path", "output_path", "run_dir", "use_tensorboard"),
    *("remote_rm_url", "agent_func_path", "custom_algorithms", "custom_generate_function_path", "custom_rm_path"),
    *("dynamic_sampling_filter_path", "buffer_filter_path", "tokenizer_chat_template"),
)
_HOME = re.compile(r"(^|[,=])\s*(~[^/,@]*)")
_RUN_NAMES = {"train_sft": "sft", "train_rm": "rm", "train_dpo": "exp", "train_kto": "kto", "train_ppo_ray": "ppo"}


@dataclass(frozen=True)
class Change:
    """An automatic change or a remark.

    Attributes:
        flag: the flag that was changed; None for a remark.
        reason: why, in a few words; empty if the new value is simply the default.
        note: a sentence for the user; empty for changes that nobody needs to read about.
    """

    flag: str | None
    reason: str
    note: str


class _Changer:
    """A copy of the configuration under change, with a record of the changes."""

    def __init__(self, config: Any, explicit: frozenset[str]) -> None:
        self.config, self.explicit = dataclasses.replace(config), explicit
        self.changes: list[Change] = []

    def set(self, flag: str, value: Any, reason: str, note: str = "") -> None:
        if getattr(self.config, flag) != value:
            setattr(self.config, flag, value)
            self.changes.append(Change(flag, reason, note))

    def fill(self, flag: str, value: Any, reason: str) -> None:
        """Set a flag that has no value yet."""
        if getattr(self.config, flag) is None:
            self.set(flag, value, reason)

    def note(self, text: str) -> None:
        self.changes.append(Change(None, "", text))


def normalize(command: str, config: Any, explicit: frozenset[str]) -> tuple[Any, list[Change]]:
    """Complete a configuration and apply the automatic changes.

    Args:
        command: name of the command.
        config: its configuration, which isn't changed.
        explicit: the flags that someone gave a value, as opposed to those at their default.

    Returns:
        The completed copy, and the changes in the order in which they were made.
    """
    changer = _Changer(config, explicit)
    cfg = changer.config
    for flag in PATH_FLAGS:
        if path := flag_value(cfg, flag):
            setattr(cfg, flag, _HOME.sub(lambda match: match[1] + os.path.expanduser(match[2]), path))
    _note_flags_without_effect(changer)
    if isinstance(cfg, TrainerOptions):
        changer.fill("wandb_run_name", f"{_RUN_NAMES[command]}_{time.strftime('%m%dT%H:%M')}", "")
        changer.fill("run_dir", os.path.join(cfg.ckpt_path, "run"), "in ckpt_path")
    if isinstance(cfg, (DataOptions, BatchInferenceConfig)):
        _fix_template(changer)
    if isinstance(cfg, DataOptions):
        _eval_split_of_files(changer)
        _evaluation(changer)
    if isinstance(cfg, DPOConfig) and not cfg.ref_pretrain:
        changer.set("ref_pretrain", cfg.pretrain, "as --pretrain")
    if isinstance(cfg, PPOConfig):
        for flag, leader in FOLLOWS.items():
            changer.fill(flag, getattr(cfg, leader), f"as --{leader}")
        _rewards(changer, cfg)
        _lengths(changer, cfg)
        _stops(changer, cfg)
        _correction(changer, cfg)
        _critic(changer, cfg)
        _batches(changer, cfg)
        _half_run(changer, cfg)
        _async(changer, cfg)
        _placement(changer, cfg)
        _micro_batches(changer, cfg)
        _algorithm(changer, cfg)
    if isinstance(cfg, TrainerOptions):
        for text in unread_flags(cfg, changer.explicit):
            changer.note(text)
    if isinstance(cfg, DeepSpeedOptions):
        _moved_state(changer, cfg)
    _attention(changer)
    return changer.config, changer.changes


def _note_flags_without_effect(changer: _Changer) -> None:
    for name, spec in flag_specs(type(changer.config)).items():
        if spec.info.no_effect and getattr(changer.config, name) != spec.default:
            changer.note(f"--{name} has no effect: {spec.info.no_effect}")


def _fix_template(changer: _Changer) -> None:
    template = changer.config.input_template
    if template is None:
        return
    if changer.config.apply_chat_template:
        if "input_template" in changer.explicit:
            changer.note("--input_template changes nothing: --apply_chat_template makes the prompts")
        return
    if "{}" not in template:
        changer.set(
            "input_template",
            None,
            "had no {}",
            f"--input_template {template!r} has no {{}} for the prompt, so no template is used",
        )
        return
    if "\\n" in template:
        changer.note(
            "--input_template has a backslash followed by n, which is not a line break; in a shell write $'...\\n'"
        )
    if "{{" in template:
        changer.note("--input_template has {{, which stays as it is; only {} is replaced, by the prompt")


def _eval_split_of_files(changer: _Changer) -> None:
    cfg = changer.config
    if "eval_split" in changer.explicit or not cfg.eval_dataset or cfg.eval_split == "train":
        return
    if all(source.is_file for source in parse_sources(cfg.eval_dataset)):
        changer.set("eval_split", "train", "the only split of a file")


def _asked_evaluation(cfg: Any) -> list[str]:
    """The flags that ask for an evaluation."""
    flags = ("eval_steps", "eval_before_train", "best_metric_key")
    return [flag for flag in flags if flag_value(cfg, flag) not in (None, False, -1, "", NO_METRIC)]


def _evaluation(changer: _Changer) -> None:
    """Say which flags about evaluation do nothing for want of another one."""
    cfg = changer.config
    if flag_value(cfg, "load_rollouts"):
        return  # nothing is evaluated then, with whatever flags
    asked = _asked_evaluation(cfg)
    if not cfg.eval_dataset:
        # train_rm evaluates on rows of the training data then
        for flag in asked if not isinstance(cfg, RMConfig) else ():
            changer.note(f"--{flag} does nothing without --eval_dataset")
        return
    if "best_metric_key" in asked and cfg.disable_ds_ckpt and not cfg.save_hf_ckpt:
        changer.note("--best_metric_key writes nothing: --disable_ds_ckpt leaves nothing of a checkpoint")
    if isinstance(cfg, PPOConfig) and cfg.eval_steps < 0 and not cfg.eval_before_train:
        changer.note("--eval_dataset is not used: add --eval_steps N to evaluate every N steps, or --eval_before_train")


def _rewards(changer: _Changer, cfg: PPOConfig) -> None:
    """An agent gives its rewards itself, and a function or a server goes before a reward model."""
    if cfg.agent_func_path:
        note = "--remote_rm_url isn't used: the agent of --agent_func_path gives the rewards"
        changer.set("remote_rm_url", None, "--agent_func_path", note)
    source = next((f for f in ("agent_func_path", "remote_rm_url", "custom_rm_path") if getattr(cfg, f)), None)
    if source is not None:
        note = f"--reward_pretrain isn't used: --{source} gives the rewards"
        if cfg.advantage_estimator == "gae" and not cfg.critic_pretrain:
            note += ". The critic starts from --pretrain; to start from the reward model, --critic_pretrain names it"
        changer.set("reward_pretrain", None, f"--{source}", note)


def _stops(changer: _Changer, cfg: PPOConfig) -> None:
    if any("\\n" in text for text in cfg.stop_strings or ()):
        changer.note("--stop_strings has a backslash followed by n, which is not a line break; in a shell write $'\\n'")


def _lengths(changer: _Changer, cfg: PPOConfig) -> None:
    prompt, response = cfg.prompt_max_len, cfg.generate_max_len
    if (prompt is None and response is None) or "max_len" in changer.explicit:
        return
    if prompt is None:
        prompt = OLD_PROMPT_MAX_LEN
        changer.set("prompt_max_len", prompt, "the default beside --generate_max_len")
    if cfg.max_new_tokens is None:
        changer.set("max_new_tokens", OLD_GENERATE_MAX_LEN, "the default beside --prompt_max_len")
    total = prompt + (cfg.max_new_tokens or 0)
    changer.set(
        "max_len",
        total,
        "prompt_max_len + max_new_tokens",
        f"--max_len is {total}: {prompt} for the prompt and {cfg.max_new_tokens} for the response",
    )


def _correction(changer: _Changer, cfg: PPOConfig) -> None:
    if cfg.use_icepop:
        if "vllm_is_correction_type" not in changer.explicit:
            changer.set("vllm_is_correction_type", "icepop", "--use_icepop")
        changer.set("enable_vllm_is_correction", True, "--use_icepop", "--use_icepop turns the correction on")
    level, mode = cfg.vllm_is_correction_level, cfg.vllm_is_correction_mode
    if level in ("token", "seq"):
        kind = CORRECTION_TYPES.get((level, mode or "mask"))
        if kind is not None and "vllm_is_correction_type" not in changer.explicit:
            changer.set("vllm_is_correction_type", kind, "from level and mode")
        changer.set("enable_vllm_is_correction", True, "--vllm_is_correction_level")
    elif mode is not None and not cfg.enable_vllm_is_correction:
        changer.note(
            "--vllm_is_correction_mode alone changes nothing; --vllm_is_correction_level turns the correction on"
        )


def _critic(changer: _Changer, cfg: PPOConfig) -> None:
    if cfg.advantage_estimator != "gae":
        dropped = "critic_pretrain" in changer.explicit
        note = f"--critic_pretrain isn't used: {cfg.advantage_estimator} has no critic" if dropped else ""
        changer.set("critic_pretrain", None, f"{cfg.advantage_estimator} has no critic", note)
    elif not cfg.critic_pretrain:
        if cfg.reward_pretrain:
            changer.set("critic_pretrain", cfg.reward_pretrain.split(",")[0].strip(), "as --reward_pretrain")
        else:
            changer.set("critic_pretrain", cfg.pretrain, "as --pretrain")


def _batches(changer: _Changer, cfg: PPOConfig) -> None:
    if cfg.ring_attn_size > 1:
        note = "--packing_samples is on: ranks share packed sequences"
        changer.set("packing_samples", True, "--ring_attn_size", note)
    if cfg.use_dynamic_batch:
        note = "--packing_samples is on: batches by tokens are packed"
        changer.set("packing_samples", True, "--use_dynamic_batch", note)
    tokens = cfg.train_max_tokens_per_gpu * data_copies(cfg)
    if cfg.use_dynamic_batch and 0 < tokens < cfg.max_len:
        changer.note(
            f"--max_len {cfg.max_len} allows samples beyond the {tokens} tokens of a micro-batch "
            "(--train_max_tokens_per_gpu); each such sample gets a micro-batch, and needs the memory, of its own"
        )
    n, batch = cfg.n_samples_per_prompt, cfg.train_batch_size
    if 0 < n < batch and batch % n:
        changer.note(
            f"--train_batch_size {batch} is no multiple of --n_samples_per_prompt {n}: the responses to a "
            f"prompt stay together, so an optimizer step has {batch // n * n} samples"
        )


def _micro_batches(changer: _Changer, cfg: PPOConfig) -> None:
    """Micro-batches that nobody gave a size are as large as their default, or as the batch of a rank allows."""
    copies = data_copies(cfg)
    ranks = cfg.actor_num_nodes * cfg.actor_num_gpus_per_node // copies if copies > 0 else 0
    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    if ranks <= 0 or cfg.use_dynamic_batch:
        return
    told = not cfg.rollout_only  # else no model takes micro-batches
    if "micro_train_batch_size" not in changer.explicit and cfg.train_batch_size % ranks == 0:
        mine = cfg.train_batch_size // ranks
        size = max((n for n in range(1, cfg.micro_train_batch_size + 1) if mine % n == 0), default=1)
        note = f"--micro_train_batch_size is {size}, which divides the {mine} samples of a rank in a step"
        changer.set("micro_train_batch_size", size, "divides the batch", note if told else "")
    if "micro_rollout_batch_size" not in changer.explicit and ranks <= samples < ranks * cfg.micro_rollout_batch_size:
        size = samples // ranks
        note = f"--micro_rollout_batch_size is {size}: a rollout has {samples} samples for {ranks} ranks"
        changer.set("micro_rollout_batch_size", size, "one micro-batch a rank", note if told else "")


def _async(changer: _Changer, cfg: PPOConfig) -> None:
    if not cfg.async_train:
        if "async_queue_size" in changer.explicit:
            changer.note("--async_queue_size does nothing without --async_train")
        return
    if cfg.colocate_all_models:
        changer.note("--colocate_all_models with --async_train: engines keep GPUs of their own")
    if not cfg.enable_vllm_is_correction:
        changer.note(
            "--async_train without --enable_vllm_is_correction trains on samples of older weights as if they were of "
            "the present ones"
        )


def _placement(changer: _Changer, cfg: PPOConfig) -> None:
    if cfg.vllm_enable_sleep and not cfg.colocate_all_models:
        note = "--vllm_enable_sleep is off: engines have GPUs of their own without --colocate_all_models"
        changer.set("vllm_enable_sleep", False, "no --colocate_all_models", note)
    if cfg.deepspeed_enable_sleep and cfg.adam_offload:
        changer.note("--deepspeed_enable_sleep moves weights only: --adam_offload keeps the optimizer on the CPU")
    if cfg.ref_reward_offload:
        changer.set("ref_offload", True, "--ref_reward_offload")
        changer.set("reward_offload", True, "--ref_reward_offload")
    for flag, (leader, *guests) in sharing_roles(cfg).items():
        if leader == "actor" or cfg.advantage_estimator == "gae":  # else there is no critic
            for role in (guest for guest in guests if guest != "engine"):
                _same_size(changer, role, leader, f"--{flag}")
    gpus, size = cfg.actor_num_nodes * cfg.actor_num_gpus_per_node, cfg.vllm_tensor_parallel_size
    together = cfg.colocate_all_models and not cfg.async_train
    if together and "vllm_num_engines" not in changer.explicit and size > 0 and gpus % size == 0:
        note = f"--vllm_num_engines is {gpus // size}: the engines share all {gpus} GPUs of the policy"
        changer.set("vllm_num_engines", gpus // size, "--colocate_all_models", note)


def _moved_state(changer: _Changer, cfg: DeepSpeedOptions) -> None:
    """Without ZeRO, fp32 weights have torch's own optimizer, whose state DeepSpeed can't have anywhere else."""
    for flag in ("adam_offload", "deepspeed_enable_sleep"):
        if flag_value(cfg, flag) and cfg.zero_stage == 0 and cfg.param_dtype == "fp32":
            note = f"--zero_stage is 1: with 0 and fp32 the optimizer's state can't leave the GPU, as --{flag} wants"
            changer.set("zero_stage", 1, f"--{flag}", note)


def _half_run(changer: _Changer, cfg: PPOConfig) -> None:
    """With --rollout_only there are only engines, with --load_rollouts there are none: nobody takes turns."""
    if not cfg.load_rollouts and not cfg.rollout_only:
        return
    mode = "--load_rollouts" if cfg.load_rollouts else "--rollout_only"
    for flag in ("vllm_enable_sleep", "deepspeed_enable_sleep"):
        changer.set(flag, False, mode, f"--{flag} changes nothing: with {mode} the GPUs are not shared in turns")
    if cfg.load_rollouts and (cfg.eval_dataset or _asked_evaluation(cfg)):
        changer.note("nothing is evaluated: --load_rollouts starts no engines")
        changer.set("eval_steps", -1, mode)
        changer.set("eval_before_train", False, mode)


def _same_size(changer: _Changer, role: str, leader: str, reason: str) -> None:
    """Models on shared GPUs are equally large; the one nobody gave a size takes the other's."""
    for part in ("num_nodes", "num_gpus_per_node"):
        if f"{role}_{part}" not in changer.explicit:
            changer.set(f"{role}_{part}", getattr(changer.config, f"{leader}_{part}"), reason)


def _algorithm(changer: _Changer, cfg: PPOConfig) -> None:
    if 0 < cfg.lora_dropout < 1:  # others are refused
        note = "--lora_dropout is 0: a policy with dropout would be trained as another one than sampled"
        changer.set("lora_dropout", 0.0, "train_ppo_ray", note)
    changer.fill("eps_clip_low_high", (cfg.eps_clip, cfg.eps_clip), "as --eps_clip")
    estimator = cfg.advantage_estimator
    if estimator in UNDISCOUNTED_ESTIMATORS and cfg.gamma != 1.0:
        note = f"--gamma {show_value(cfg.gamma)} is taken as 1: {estimator} has one reward for each response"
        changer.set("gamma", 1.0, f"{estimator} doesn't discount", note)
    if cfg.policy_loss_type in SEQUENCE_LOSSES:
        note = f"--loss_agg_mode is seq-mean-token-mean: {cfg.policy_loss_type} weights sequences equally"
        told = note if "loss_agg_mode" in changer.explicit else ""
        changer.set("loss_agg_mode", "seq-mean-token-mean", f"--policy_loss_type {cfg.policy_loss_type}", told)
    if cfg.agent_func_path and estimator in ("gae", "reinforce"):
        changer.note(
            f"--agent_func_path with {estimator}: the reward of each turn counts at its end; OpenRLHF counts the sum "
            "at the end of the episode, as happens here if only the last turn gives a reward"
        )
    if cfg.freezing_actor_steps >= 0 and estimator != "gae":
        changer.note(
            f"--freezing_actor_steps {cfg.freezing_actor_steps}: nothing is trained in these steps, "
            f"since {estimator} has no critic"
        )
    if cfg.enable_vllm_is_correction and (cfg.top_p < 1 or cfg.top_k > 0 or cfg.min_p > 0):
        changer.note(
            "--enable_vllm_is_correction compares probabilities among all tokens with those among the tokens that "
            "--top_p, --top_k or --min_p left to sample from: the ratios have a bias"
        )
    hook = next((f for f in ("custom_generate_function_path", "custom_rm_path") if getattr(cfg, f)), None)
    changer.fill("reward_on_failure", "drop" if hook else "stop", f"--{hook}" if hook else "")
    in_loss = cfg.init_kl_coef > 0 and cfg.use_kl_loss and not cfg.kl_unbiased_gradient
    if in_loss and cfg.kl_estimator == "k1":
        changer.note(
            "--use_kl_loss with k1 pulls nowhere on average: its gradient has mean 0. "
            "Use --kl_estimator k2, or --kl_unbiased_gradient"
        )
    elif in_loss and cfg.kl_estimator == "k3":
        changer.note("--use_kl_loss with k3 follows the forward KL; k2 or --kl_unbiased_gradient follow the reverse KL")
    elif cfg.init_kl_coef > 0 and not cfg.use_kl_loss and cfg.kl_estimator != "k1":
        changer.note(f"--kl_estimator {cfg.kl_estimator} is meant for --use_kl_loss; in the reward use k1")


def _attention(changer: _Changer) -> None:
    cfg = changer.config
    chosen = flag_value(cfg, "attn_implementation")
    packed = flag_value(cfg, "packing_samples") and not isinstance(cfg, ServeRMConfig)
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(chosen)
    if packed and chosen in ("eager", "sdpa"):
        note = f"--attn_implementation is auto: {chosen} can't keep packed samples apart"
        changer.set("attn_implementation", "auto", "--packing_samples", note)
    elif package is not None and importlib.util.find_spec(package) is None:
        note = f"--attn_implementation is auto, with equal results: {chosen} needs {package}, which isn't installed"
        changer.set("attn_implementation", "auto", f"{package} isn't installed", note)
