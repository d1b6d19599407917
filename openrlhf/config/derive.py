"""The arithmetic of a run: steps, batches and GPUs that follow from a configuration. Trainers use it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openrlhf.config.commands import PPOConfig, TrainerOptions
from openrlhf.config.datasource import parse_sources
from openrlhf.config.flag import flag_value
from openrlhf.config.options_model import DeepSpeedOptions
from openrlhf.config.options_ppo import NO_METRIC


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from a configuration; None where they don't apply or the row count is missing.

    Attributes:
        data_parallel_size: groups of ranks that see different samples.
        micro_batches_per_step: micro-batches of one rank in an optimizer step; None if tokens fill them.
        samples_per_rollout: samples of a full rollout.
        steps_per_rollout: optimizer steps on a full rollout, inner epochs included.
        forward_micro_batches: micro-batches of one rank in the forward passes over a full rollout.
        num_rows: rows (prompts) in a pass over the data.
        num_rollouts: rollouts in the whole run.
        total_steps: optimizer steps in the whole run, and so the length of the schedule.
        warmup_steps: the first of them, in which the learning rate rises.
        actor_steps: those of the actor: all of them but for the rollouts in which it is frozen.
        actor_warmup_steps: the first of those.
        prompt_limit: largest number of tokens of a prompt.
        gpus: GPUs of each role; roles that don't exist are left out.
        total_gpus: GPUs of the whole job; less than the sum of `gpus` where roles share.
    """

    data_parallel_size: int
    micro_batches_per_step: int | None
    num_rows: int | None
    total_steps: int | None
    warmup_steps: int | None
    gpus: Mapping[str, int]
    total_gpus: int
    samples_per_rollout: int | None = None
    steps_per_rollout: int | None = None
    forward_micro_batches: int | None = None
    num_rollouts: int | None = None
    actor_steps: int | None = None
    actor_warmup_steps: int | None = None
    prompt_limit: int | None = None


def derive(cfg: TrainerOptions, num_rows: int | None = None, world_size: int = 1) -> Derived:
    """The arithmetic of a run.

    Args:
        cfg: a normalized and valid configuration of a training command.
        num_rows: usable rows (prompts) of the training data, if they are known.
        world_size: ranks of the job; train_ppo_ray takes them from its flags instead.
    """
    if isinstance(cfg, PPOConfig):
        return _derive_ppo(cfg, num_rows)
    ranks = data_parallel_size(cfg, world_size)
    total = None
    if num_rows is not None:
        # Accumulation runs on across epochs, so only the last incomplete batch of all is left out.
        total = _capped(cfg, num_rows * cfg.max_epochs // cfg.train_batch_size)
    return Derived(
        data_parallel_size=ranks,
        micro_batches_per_step=cfg.train_batch_size // (cfg.micro_train_batch_size * ranks),
        num_rows=num_rows,
        total_steps=total,
        warmup_steps=_warmup(cfg, total),
        gpus={"model": world_size},
        total_gpus=world_size,
    )


def data_parallel_size(cfg: DeepSpeedOptions, world_size: int) -> int:
    """Groups of ranks that see different samples, out of `world_size` ranks of one model."""
    return world_size // data_copies(cfg)


def data_copies(cfg: DeepSpeedOptions) -> int:
    """Neighbouring ranks that see the same samples, and divide sequences or layers among them."""
    return cfg.ring_attn_size * cfg.ds_tensor_parallel_size


def optimizer_steps(cfg: PPOConfig, num_prompts: int) -> int:
    """Optimizer steps on a rollout of `num_prompts` prompts, inner epochs included.

    The responses to a prompt stay in one step, unless they alone are more than a step. The last step of an
    epoch may be smaller.
    """
    batch, n = cfg.train_batch_size, cfg.n_samples_per_prompt
    prompts_per_step = batch // n
    steps = num_prompts / prompts_per_step if prompts_per_step else num_prompts * n / batch
    return math.ceil(steps) * cfg.max_epochs


def _derive_ppo(cfg: PPOConfig, num_rows: int | None) -> Derived:
    ranks = data_parallel_size(cfg, cfg.actor_num_nodes * cfg.actor_num_gpus_per_node)
    samples = cfg.rollout_batch_size * cfg.n_samples_per_prompt
    rollouts = total = actor = None
    if num_rows is not None:
        rollouts = _capped(cfg, cfg.num_episodes * math.ceil(num_rows / cfg.rollout_batch_size))
        total = _steps_of(cfg, num_rows, rollouts)
        actor = total - _steps_of(cfg, num_rows, min(rollouts, frozen_rollouts(cfg)))
    gpus, total_gpus = gpus_per_role(cfg)
    static = not cfg.use_dynamic_batch
    return Derived(
        data_parallel_size=ranks,
        micro_batches_per_step=cfg.train_batch_size // (cfg.micro_train_batch_size * ranks) if static else None,
        samples_per_rollout=samples,
        steps_per_rollout=optimizer_steps(cfg, cfg.rollout_batch_size),
        forward_micro_batches=math.ceil(samples / (cfg.micro_rollout_batch_size * ranks)) if static else None,
        num_rows=num_rows,
        num_rollouts=rollouts,
        total_steps=total,
        warmup_steps=_warmup(cfg, total),
        actor_steps=actor,
        actor_warmup_steps=_warmup(cfg, actor),
        prompt_limit=prompt_limit(cfg),
        gpus=gpus,
        total_gpus=total_gpus,
    )


def writes_checkpoints(cfg: TrainerOptions) -> bool:
    """Whether a run writes any: every so many steps, or a PPO run the best by its evaluations."""
    if cfg.save_steps > 0:
        return True
    evaluates = isinstance(cfg, PPOConfig) and cfg.eval_dataset and (cfg.eval_steps > 0 or cfg.eval_before_train)
    return bool(evaluates) and flag_value(cfg, "best_metric_key") != NO_METRIC


def frozen_rollouts(cfg: PPOConfig) -> int:
    """Rollouts, from the first one on, that the actor is not trained on: numbers 0 to --freezing_actor_steps."""
    return cfg.freezing_actor_steps + 1


def _steps_of(cfg: PPOConfig, num_rows: int, rollouts: int) -> int:
    """Optimizer steps on the first rollouts; in every episode they are full ones but for the last."""
    full, rest = divmod(num_rows, cfg.rollout_batch_size)
    short = rollouts // (full + 1) if rest else 0
    return (rollouts - short) * optimizer_steps(cfg, cfg.rollout_batch_size) + short * optimizer_steps(cfg, rest)


def prompt_limit(cfg: PPOConfig) -> int:
    """Largest number of tokens of a prompt; at least one token is left for the response."""
    if cfg.prompt_max_len is not None:
        return cfg.prompt_max_len
    return cfg.max_len - (cfg.max_new_tokens or 1)


def gpus_per_role(cfg: PPOConfig) -> tuple[dict[str, int], int]:
    """GPUs of each role that exists, in the order in which they are started, and of the whole job.

    No reference model without a KL coefficient, no critic without GAE, no reward model where rewards come from
    elsewhere (`normalize` takes it out then); no engines when rollouts are loaded, and nothing else when only they
    are wanted.
    """
    engines = cfg.vllm_num_engines * cfg.vllm_tensor_parallel_size
    if cfg.rollout_only:
        return {"engine": engines}, engines
    gpus = {"actor": cfg.actor_num_nodes * cfg.actor_num_gpus_per_node}
    if cfg.init_kl_coef > 0:
        gpus["ref"] = cfg.ref_num_nodes * cfg.ref_num_gpus_per_node
    if cfg.advantage_estimator == "gae":
        gpus["critic"] = cfg.critic_num_nodes * cfg.critic_num_gpus_per_node
    if cfg.reward_pretrain:
        gpus["reward"] = cfg.reward_num_nodes * cfg.reward_num_gpus_per_node
    if not cfg.load_rollouts:
        gpus["engine"] = engines
    guests = {role for roles in sharing_roles(cfg).values() for role in [r for r in roles if r in gpus][1:]}
    return gpus, sum(count for role, count in gpus.items() if role not in guests)


def sharing_roles(cfg: PPOConfig) -> dict[str, tuple[str, ...]]:
    """Roles that share their GPUs with one another where they exist, the actor first, by the flag that says so."""
    if cfg.colocate_all_models:
        models = ("actor", "ref", "critic", "reward")
        return {"colocate_all_models": models if cfg.async_train else (*models, "engine")}
    pairs = (
        ("colocate_actor_ref", cfg.colocate_actor_ref, ("actor", "ref")),
        ("colocate_critic_reward", cfg.colocate_critic_reward, ("critic", "reward")),
    )
    return {flag: roles for flag, shared, roles in pairs if shared}


def count_rows(cfg: TrainerOptions) -> int | None:
    """Training rows, where they can be counted without loading data: JSON-lines files on this machine."""
    text = cfg.prompt_data if isinstance(cfg, PPOConfig) else flag_value(cfg, "dataset")
    mixed = cfg.prompt_data_probs if isinstance(cfg, PPOConfig) else flag_value(cfg, "dataset_probs")
    split = cfg.prompt_split if isinstance(cfg, PPOConfig) else flag_value(cfg, "dataset_split")
    if not text or mixed or "[" in split:
        return None
    cap = flag_value(cfg, "max_samples") or 0
    total = 0
    for source in parse_sources(text):
        path = Path(source.path)
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as lines:
            total += min(cap, sum(1 for line in lines if line.strip()))
    return min(cap, total)


def _capped(cfg: TrainerOptions, steps: int) -> int:
    """Global steps (in train_ppo_ray rollouts, elsewhere optimizer steps) up to max_steps."""
    return steps if cfg.max_steps < 0 else min(steps, cfg.max_steps)


def _warmup(cfg: TrainerOptions, total: int | None) -> int | None:
    return None if total is None else math.ceil(total * cfg.lr_warmup_ratio)
