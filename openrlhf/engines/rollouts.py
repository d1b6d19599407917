"""What an engine process needs to run whole episodes: tokenizer, rewards and agents, built once from plain data."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from openrlhf.config import PPOConfig
from openrlhf.models.loading import load_tokenizer
from openrlhf.models.vision import VisionInputs
from openrlhf.rollout.agents import AgentExecutorBase
from openrlhf.rollout.episodes import EpisodeSpec, GroupFilter
from openrlhf.rollout.hooks import GenerateFunction, SampleReward, judge_group, load_hook
from openrlhf.rollout.images import PromptImages
from openrlhf.rollout.loader import load_agent_executor
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import RewardClient, RewardSource, make_reward_source


def model_eos_ids(path: str) -> frozenset[int]:
    """Every id that ends a sequence, as generation_config.json and config.json of a model folder name them.

    Empty when the folder names none (or is a hub id): then the tokenizer's own counts.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if file.is_file():
            value = json.loads(file.read_text()).get("eos_token_id")
            if value is not None:
                found.update(value if isinstance(value, list) else [value])
    return frozenset(found)


def prompt_images(cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> PromptImages:
    """How the model's prompts have images.

    Raises:
        VisionError: the model takes none.
    """
    vision = VisionInputs(cfg.model_path)
    placeholder, token = vision.placeholder(tokenizer), vision.config.image_token_id
    return PromptImages(placeholder, token, vision.count_tokens, cfg.max_images_per_prompt)


def reward_source(cfg: PPOConfig) -> RewardSource | None:
    """Where rewards come from; None when an agent, a generate function or a reward model gives them.

    Raises:
        RewardError, HookError: there is no such reward, or it can't be called.
    """
    if cfg.custom_rm_path:
        contract = "group_rm" if cfg.group_rm else "custom_rm_path"
        return SampleReward(load_hook("custom_rm_path", cfg.custom_rm_path, contract), cfg)
    return make_reward_source(cfg.remote_rm_url, cfg.reward_weights) if cfg.remote_rm_url else None


def executor_of(cfg: PPOConfig) -> AgentExecutorBase | None:
    """What plays the episodes, if the user brings that.

    Raises:
        AgentError, HookError: it can't be loaded or called.
    """
    if cfg.custom_generate_function_path:
        return GenerateFunction(load_hook("custom_generate_function_path", cfg.custom_generate_function_path), cfg)
    return load_agent_executor(cfg.agent_func_path) if cfg.agent_func_path else None


def group_filter_of(cfg: PPOConfig) -> GroupFilter | None:
    """The user's filter of groups.

    Raises:
        HookError: it can't be loaded or called.
    """
    path = cfg.dynamic_sampling_filter_path
    return partial(judge_group, load_hook("dynamic_sampling_filter_path", path), cfg) if path else None


def episode_spec(cfg: PPOConfig) -> EpisodeSpec:
    """What the episodes of a run have in common, rewards and agents loaded; each group brings its own sampling options.

    Raises:
        ExplainedError: a hook, a reward or an agent can't be loaded.
    """
    source, rewards = reward_source(cfg), None
    if source is not None:
        # A function for single samples gets each as soon as it is there.
        calls = {"batch_size": 1, "max_concurrency": 64} if cfg.custom_rm_path else {}
        rewards = RewardClient(source, on_failure=cfg.reward_on_failure or "stop", **calls)
    tokenizer = load_tokenizer(cfg.model_path, use_fast=not cfg.disable_fast_tokenizer)
    return EpisodeSpec(
        sampling=SamplingParams(),
        max_length=cfg.max_len,
        tokenizer=tokenizer,
        eos_token_ids=model_eos_ids(cfg.model_path),
        rewards=rewards,
        group_reward=cfg.group_rm,
        group_filter=group_filter_of(cfg),
        executor=executor_of(cfg),
        prompt_limit=cfg.prompt_max_len,
        seed=cfg.seed,
        episode_timeout=cfg.rollout_timeout,
        # A response that does not come about can't be given a reward of 0 either.
        on_agent_failure="drop" if cfg.reward_on_failure in ("drop", "zero") else "raise",
        images=prompt_images(cfg, tokenizer) if cfg.max_images_per_prompt else None,
    )
