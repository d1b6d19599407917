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


def sampling_line(cfg: PPOConfig) -> str:
    """What the engines sample with, for the start of a run."""
    options = training_sampling(cfg)
    shown = [f"temperature {options.temperature:g}", f"top_p {options.top_p:g}"]
    shown += [f"top_k {options.top_k if options.top_k > 0 else 'off'}", f"min_p {options.min_p:g}"]
    shown.append(f"repetition_penalty {options.repetition_penalty:g}")
    return f"Sampling: {', '.join(shown)}; defaults of the model's generation_config.json are not used"
