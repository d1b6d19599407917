"""Sampling options of training and evaluation. Nothing comes from the model's generation_config.json."""

from __future__ import annotations

from dataclasses import replace

from openrlhf.config import PPOConfig
from openrlhf.rollout.protocol import SamplingParams


def training_sampling(cfg: PPOConfig) -> SamplingParams:
    """Options of training rollouts."""
    return SamplingParams(
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        stop=tuple(cfg.stop_strings or ()),
        stop_token_ids=tuple(cfg.stop_token_ids or ()),
        max_tokens=cfg.max_new_tokens,
        min_tokens=0,
        logprobs=cfg.enable_vllm_is_correction,
    )


def eval_sampling(cfg: PPOConfig) -> SamplingParams:
    """Options of evaluation: those of training at another temperature."""
    return replace(training_sampling(cfg), temperature=cfg.eval_temperature, logprobs=False)
