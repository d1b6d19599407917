"""The rules of train_ppo_ray that concern more than one flag."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Collection, Iterator
from pathlib import Path

from openrlhf.config.commands import PPOConfig
from openrlhf.config.derive import data_copies, gpus_per_role, sharing_roles
from openrlhf.config.foreign import value_here
from openrlhf.config.normalize import CORRECTION_TYPES
from openrlhf.config.options_algorithm import ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES
from openrlhf.config.options_model import DeepSpeedOptions
from openrlhf.config.problems import FlagValueError, Violation, not_there
from openrlhf.config.reward_sources import (
    BUILTIN_PREFIX,
    BUILTIN_REWARDS,
    is_url,
    parse_reward_sources,
    parse_reward_weights,
)
from openrlhf.config.values import show_value

# Without these being sound numbers, the arithmetic of batches and placement means nothing.
_ARITHMETIC = frozenset(
    (
        "train_batch_size micro_train_batch_size micro_rollout_batch_size rollout_batch_size "
        "n_samples_per_prompt actor_num_nodes actor_num_gpus_per_node ring_attn_size ds_tensor_parallel_size "
        "vllm_num_engines vllm_tensor_parallel_size max_len max_new_tokens"
    ).split()
)

# Models that a run may do without, whose sizes may then be 0, and why it can't here.
NEEDED = {
    "ref": "the reference model is needed: --init_kl_coef is above 0",
    "critic": "the critic is needed: --advantage_estimator is gae",
    "reward": "the reward model is needed: --reward_pretrain gives the rewards",
}
HOOKS = ("custom_generate_function_path", "custom_rm_path", "dynamic_sampling_filter_path", "buffer_filter_path")


def check_ppo(cfg: PPOConfig, explicit: Collection[str], broken: Collection[str]) -> Iterator[Violation]:
    """Check all rules; `broken` are the flags already known to be wrong."""
    yield from _check_rewards(cfg)
    yield from _check_files(cfg)
    yield from _check_algorithms(cfg)
    yield from _check_estimator(cfg)
    yield from _check_correction(cfg, explicit)
    yield from _check_rollouts(cfg)
    no_devices = list(_check_sizes(cfg))
    yield from no_devices
    if not no_devices and not _ARITHMETIC & set(broken):
        yield from _check_lengths(cfg)
        yield from _check_batches(cfg, explicit)
        yield from _check_placement(cfg)


def _check_rewards(cfg: PPOConfig) -> Iterator[Violation]:
    flags = ("remote_rm_url", "agent_func_path", "reward_pretrain", "custom_rm_path")
    sources = [f for f in flags if getattr(cfg, f)]
    choices = (
        "--remote_rm_url with URLs, a .py file or builtin:math, --agent_func_path with a .py file, --custom_rm_path "
        "with a function, or --reward_pretrain with a reward model"
    )
    # A generate function may give the rewards itself.
    if not sources and not cfg.custom_generate_function_path:
        yield Violation("remote_rm_url", "nothing gives a reward", f"use one of {choices}")
    elif len(sources) > 1:
        given = " and ".join("--" + flag for flag in sources)
        yield Violation(sources[0], f"{given} both give rewards, and only one can count", "keep one")
    instead = "use --remote_rm_url, --custom_rm_path or --agent_func_path (serve_rm makes a URL of a reward model)"
    if sources == ["reward_pretrain"]:
        if "," in (cfg.reward_pretrain or ""):
            yield Violation("reward_pretrain", "several reward models can't be used at once", "name one")
        if cfg.eval_dataset:
            problem = "evaluation needs scores that a reward model in training doesn't give"
            yield Violation("eval_dataset", problem, instead)
    for flag in ("dynamic_filtering", "dynamic_sampling_filter_path"):
        if getattr(cfg, flag) and (sources == ["reward_pretrain"] or (flag == "dynamic_filtering" and not sources)):
            yield Violation(flag, "filters by scores that must be there before the models run", instead)
    yield from _check_hooks(cfg)


def _check_hooks(cfg: PPOConfig) -> Iterator[Violation]:
    for flag in HOOKS:
        path = getattr(cfg, flag) or ""
        if ":" in path:
            yield from _check_python_file(flag, path.rpartition(":")[0], "the hook, and write file.py:function")
        elif path.endswith(".py"):
            yield Violation(flag, f"{path} names no function", f"write {path}:function")
    if cfg.group_rm and cfg.advantage_estimator == "remax":
        problem = "the greedy response that remax compares with belongs to no group"
        yield Violation("group_rm", problem, "use another estimator, or a reward for single samples")


def _check_files(cfg: PPOConfig) -> Iterator[Violation]:
    yield from _check_python_file("agent_func_path", cfg.agent_func_path, "AgentExecutor")
    yield from _check_python_file("custom_algorithms", cfg.custom_algorithms, "estimators or losses")
    problems = list(check_reward_sources(cfg.remote_rm_url, cfg.reward_weights))
    yield from problems
    sources = {} if problems else parse_reward_sources(cfg.remote_rm_url or "")
    for entry in itertools.chain(*sources.values()):
        if not is_url(entry) and not entry.startswith(BUILTIN_PREFIX):
            yield from _check_python_file("remote_rm_url", entry, "reward_func")


def check_reward_sources(remote_rm_url: str | None, reward_weights: str | None) -> Iterator[Violation]:
    """What is wrong with the names and weights of rewards."""
    flag = "remote_rm_url"
    try:
        sources = parse_reward_sources(remote_rm_url or "")
        flag = "reward_weights"
        parse_reward_weights(reward_weights, sources)
    except FlagValueError as error:
        yield Violation(flag, error.problem, error.fix)


def _check_python_file(flag: str, path: str | None, defines: str) -> Iterator[Violation]:
    if not path:
        return
    if not path.endswith(".py"):
        if flag == "remote_rm_url":
            builtin = " or ".join(BUILTIN_PREFIX + name for name in BUILTIN_REWARDS)
            fix = f"write http://{path} for a server, or give a .py file that defines {defines}, or {builtin}"
            yield Violation(flag, f"{path!r} is not a URL (http://...) or a .py file", fix)
        else:
            yield Violation(flag, f"{path!r} is not a .py file", f"give a file that defines {defines}")
    elif not Path(path).is_file():
        yield not_there(flag, f"file {path}")


def _check_algorithms(cfg: PPOConfig) -> Iterator[Violation]:
    if cfg.custom_algorithms:
        return  # the file may register any name; what it lacks is told when it is loaded
    for flag, known in (("advantage_estimator", ESTIMATORS), ("policy_loss_type", POLICY_LOSSES)):
        name = getattr(cfg, flag)
        if name not in known:
            close = [value_here(flag, name), *difflib.get_close_matches(name, known, 1)]
            hint = next((f"did you mean {meant}? It is " for meant in close if meant), "it is ")
            fix = f"{hint}one of {', '.join(known)}, or a name that a --custom_algorithms file registers"
            yield Violation(flag, f"there is no {name}", fix)


def _check_estimator(cfg: PPOConfig) -> Iterator[Violation]:
    n, estimator = cfg.n_samples_per_prompt, cfg.advantage_estimator
    if cfg.max_images_per_prompt and estimator == "gae":
        problem = "vision models have no critic, which gae needs"
        yield Violation("advantage_estimator", problem, "use another estimator, such as reinforce")
    if n == 1 and estimator in GROUP_ESTIMATORS:
        yield Violation(
            "n_samples_per_prompt",
            f"{estimator} compares the responses to one prompt, and with --n_samples_per_prompt 1 there is "
            "nothing to compare: every advantage would be 0",
            "use 2 or more, or --advantage_estimator reinforce or gae",
        )
    elif estimator == "pass_at_k" and 1 < n <= cfg.pass_k:
        yield Violation(
            "pass_k",
            f"pass_at_k compares subsets of {cfg.pass_k} responses, and --n_samples_per_prompt {n} has no two that "
            "differ",
            f"use --pass_k {n - 1} or less, or more responses",
        )
    elif n == 1 and (cfg.dynamic_filtering or cfg.dynamic_sampling_filter_path):
        flag = "dynamic_filtering" if cfg.dynamic_filtering else "dynamic_sampling_filter_path"
        problem = f"--{flag} judges groups of responses, and groups of 1 say nothing"
        yield Violation("n_samples_per_prompt", problem, "use 2 or more")


def _check_correction(cfg: PPOConfig, explicit: Collection[str]) -> Iterator[Violation]:
    level, mode = cfg.vllm_is_correction_level, cfg.vllm_is_correction_mode
    if cfg.use_icepop and cfg.vllm_is_correction_type != "icepop":
        yield Violation(
            "use_icepop", f"contradicts --vllm_is_correction_type {cfg.vllm_is_correction_type}", "keep one"
        )
    if level == "seq" and mode == "clip":
        yield Violation(
            "vllm_is_correction_mode",
            "whole sequences can be masked but not clipped",
            "use mask, or --vllm_is_correction_level token",
        )
    elif level in ("token", "seq") and "vllm_is_correction_type" in explicit:
        meant = CORRECTION_TYPES[level, mode or "mask"]
        if meant != cfg.vllm_is_correction_type:
            problem = f"contradicts level {level} with mode {mode or 'mask'}, which is {meant}"
            yield Violation("vllm_is_correction_type", problem, "leave one of the two out")
    elif level == "off" and cfg.enable_vllm_is_correction:
        problem = "is off, but --enable_vllm_is_correction or --use_icepop turns the correction on"
        yield Violation("vllm_is_correction_level", problem, "leave one of the two out")
    if cfg.enable_vllm_is_correction and cfg.vllm_is_correction_gating != "ratio":
        gating = cfg.vllm_is_correction_gating
        if cfg.vllm_is_truncated_threshold[0] != 0:
            yield Violation(
                "vllm_is_truncated_threshold",
                f"{gating} is a divergence with an upper bound only, but the lower one is "
                f"{show_value(cfg.vllm_is_truncated_threshold[0])}",
                "give one value, or 0 and the upper bound",
            )
        if cfg.vllm_is_correction_type == "tis":
            yield Violation(
                "vllm_is_correction_gating",
                f"a ratio can't be clamped by {gating}",
                "use --vllm_is_correction_type icepop or seq-mask-tis",
            )


def _check_rollouts(cfg: PPOConfig) -> Iterator[Violation]:
    surplus = (cfg.vllm_generate_batch_size or 0) > cfg.rollout_batch_size
    if surplus and not (cfg.async_train or cfg.dynamic_filtering or cfg.dynamic_sampling_filter_path):
        yield Violation(
            "vllm_generate_batch_size",
            f"{cfg.vllm_generate_batch_size} prompts are more than --rollout_batch_size "
            f"{cfg.rollout_batch_size} can use",
            "use at most as many, or --async_train, or a filter that drops some",
        )
    if cfg.dump_rollouts and not cfg.load_checkpoint and any(Path(cfg.dump_rollouts).glob("rollout_step_*.jsonl")):
        yield Violation(
            "dump_rollouts",
            f"{cfg.dump_rollouts} has the rollouts of another run, and they would be mixed up",
            "name another folder, remove that one, or go on with that run by --load_checkpoint",
        )
    if "" in (cfg.stop_strings or ()):
        yield Violation("stop_strings", "an empty text ends every response at once", "write texts with characters")


def _check_lengths(cfg: PPOConfig) -> Iterator[Violation]:
    response, prompt = cfg.max_new_tokens, cfg.prompt_max_len
    if cfg.generate_max_len is not None and response != cfg.generate_max_len:
        yield Violation(
            "generate_max_len",
            f"is {cfg.generate_max_len}, but --max_new_tokens, which means the same, is {response}",
            "leave one of the two out",
        )
    elif prompt is not None and prompt + (response or 1) > cfg.max_len:
        parts = f"prompt_max_len {prompt} + max_new_tokens {response}" if response else f"prompt_max_len {prompt}"
        fix = f"use --max_len {prompt + (response or 1)} or more"
        yield Violation("max_len", f"{parts} and a response don't fit into {cfg.max_len}", fix)
    elif response is not None and response >= cfg.max_len:
        problem = f"max_new_tokens {response} leaves no room for a prompt in {cfg.max_len} tokens"
        yield Violation("max_len", problem, f"use --max_len above {response}, or less --max_new_tokens")
    limit = response or cfg.max_len
    if cfg.overlong_buffer_len is not None and cfg.overlong_buffer_len > limit:
        name = "max_new_tokens" if response else "max_len"
        problem = f"{show_value(cfg.overlong_buffer_len)} tokens are more than --{name} {limit}"
        yield Violation("overlong_buffer_len", problem, f"use {limit} or less")


def _check_sizes(cfg: PPOConfig) -> Iterator[Violation]:
    roles = gpus_per_role(cfg)[0]
    for role, reason in NEEDED.items():
        for part, size in zip(("num_nodes", "num_gpus_per_node"), _size(cfg, role), strict=True):
            if size == 0 and role in roles:
                yield Violation(f"{role}_{part}", f"is 0, but {reason}", "must be 1 or more")


def _check_batches(cfg: PPOConfig, explicit: Collection[str]) -> Iterator[Violation]:
    world = cfg.actor_num_nodes * cfg.actor_num_gpus_per_node
    model_size = data_copies(cfg)
    models = {role: gpus for role, gpus in gpus_per_role(cfg)[0].items() if role != "engine"}
    for gpus in dict.fromkeys(models.values()):
        yield from check_second_copies(cfg, gpus)
    for role, gpus in models.items():
        if gpus % model_size:
            yield Violation(
                f"{role}_num_gpus_per_node",
                f"{gpus} GPUs don't divide into groups of ring_attn_size x ds_tensor_parallel_size = {model_size}",
                f"use a multiple of {model_size}",
            )
    if world % model_size:
        return
    ranks = world // model_size
    batch, micro = cfg.train_batch_size, cfg.micro_train_batch_size
    if cfg.use_dynamic_batch:
        if batch < ranks:
            problem = f"{batch} samples are less than one for each of {ranks} ranks"
            yield Violation("train_batch_size", problem, f"use {ranks} or more")
    else:
        # Micro-batches that nobody gave a size fit themselves, once every rank has equally many samples.
        yield from check_division(batch, micro if "micro_train_batch_size" in explicit else None, ranks)
    prompts, n = cfg.rollout_batch_size, cfg.n_samples_per_prompt
    whole_groups = batch % n == 0 or n > batch  # otherwise steps are a little smaller than the batch
    if (prompts * n) % batch and whole_groups:
        step = batch // math.gcd(batch, n)
        yield Violation(
            "rollout_batch_size",
            f"a rollout of {prompts} prompts x {n} responses = {prompts * n} samples is no multiple of "
            f"--train_batch_size {batch}",
            "use " + " or ".join(f"--rollout_batch_size {m}" for m in nearest_multiples(prompts, step)),
        )
    elif prompts * n < ranks:
        yield Violation(
            "rollout_batch_size",
            f"a rollout of {prompts} prompts x {n} responses = {prompts * n} samples has less than one for each of "
            f"{ranks} ranks",
            f"use a rollout of at least {ranks} samples: --rollout_batch_size {math.ceil(ranks / n)} or more",
        )
    forward = 1 if cfg.use_dynamic_batch else cfg.micro_rollout_batch_size
    if prompts * n // forward < ranks <= prompts * n:
        yield Violation(
            "micro_rollout_batch_size",
            f"{prompts * n} samples of a rollout in micro-batches of {forward} are less than one for each "
            f"of {ranks} ranks",
            f"use --micro_rollout_batch_size {prompts * n // ranks} or less, or larger rollouts",
        )


def _check_placement(cfg: PPOConfig) -> Iterator[Violation]:
    gpus = gpus_per_role(cfg)[0]
    for flag, roles in sharing_roles(cfg).items():
        leader, *guests = [role for role in roles if role in gpus] or [""]
        for role in guests:
            if role == "engine":
                if gpus[role] != gpus[leader]:
                    size, fix = cfg.vllm_tensor_parallel_size, "make the two equal"
                    if gpus[leader] % size == 0:
                        fix = f"use --vllm_num_engines {gpus[leader] // size}, or leave it out"
                    yield Violation(
                        flag,
                        f"the policy has {gpus[leader]} GPUs, but {cfg.vllm_num_engines} engines x {size} "
                        f"(vllm_tensor_parallel_size) are {gpus[role]}, and they share",
                        fix,
                    )
            elif (mine := _size(cfg, role)) != (theirs := _size(cfg, leader)):
                yield Violation(
                    flag,
                    f"{role} has {mine[0]} x {mine[1]} GPUs (nodes x GPUs per node) and {leader} {theirs[0]} x "
                    f"{theirs[1]}, but they share",
                    f"give --{role}_num_nodes and --{role}_num_gpus_per_node the values of the {leader}",
                )


def _size(cfg: PPOConfig, role: str) -> tuple[int, int]:
    return getattr(cfg, f"{role}_num_nodes"), getattr(cfg, f"{role}_num_gpus_per_node")


def check_division(batch: int, micro: int | None, ranks: int) -> Iterator[Violation]:
    """The samples of a step must split into whole micro-batches on every rank; without `micro`, evenly among ranks."""
    if micro is None and batch % ranks:
        yield Violation(
            "train_batch_size",
            f"{batch} samples don't split evenly among {ranks} ranks: {batch} is no multiple of {ranks}",
            "use " + " or ".join(f"--train_batch_size {n}" for n in nearest_multiples(batch, ranks)),
        )
    elif micro is not None and batch % (micro * ranks):
        yield Violation(
            "train_batch_size",
            f"{batch} samples don't split into micro-batches of {micro} on {ranks} ranks: "
            f"{batch} is no multiple of {micro} x {ranks} = {micro * ranks}",
            "use " + " or ".join(f"--train_batch_size {n}" for n in nearest_multiples(batch, micro * ranks)),
        )


def check_second_copies(cfg: DeepSpeedOptions, ranks: int) -> Iterator[Violation]:
    """The ranks of a model must divide into groups of ``--zpg``; fewer than one group are one."""
    if cfg.zpg > 1 and cfg.zero_stage == 3 and ranks % min(cfg.zpg, ranks):
        sizes = ", ".join(str(size) for size in range(2, ranks + 1) if ranks % size == 0)
        yield Violation("zpg", f"{ranks} ranks don't divide into groups of {cfg.zpg}", f"use one of {sizes}")


def nearest_multiples(number: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `number`, below (if above 0) and above."""
    below = number // unit * unit
    return [m for m in (below, below + unit) if m > 0]
