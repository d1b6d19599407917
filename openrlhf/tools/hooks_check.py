"""The hooks of a run on its first prompts, with made-up responses instead of an engine (``hooks check``)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openrlhf.config import PPOConfig
from openrlhf.config.derive import prompt_limit
from openrlhf.config.rules_ppo import HOOKS
from openrlhf.datasets.prompts import PromptRow, load_prompts
from openrlhf.engines.rollouts import episode_spec
from openrlhf.models.loading import load_tokenizer
from openrlhf.rollout.episodes import run_group
from openrlhf.rollout.errors import RolloutError
from openrlhf.rollout.group import Group
from openrlhf.rollout.hooks import BufferFilter
from openrlhf.rollout.protocol import GenerationResult, SamplingParams, Tokenizer
from openrlhf.tools.report import Report
from openrlhf.trainer.prompt_stream import prompt_item
from openrlhf.trainer.sampling import training_sampling

PROMPTS = 4
"""Prompts that are tried: the first ones."""
_SHOWN_FAILURES = 3


class LabelEngine:
    """Answers every other request with the label of its prompt, and the others with a question mark.

    Args:
        rows: the prompts that may be asked.
        tokenizer: their tokenizer.
    """

    def __init__(self, rows: Sequence[PromptRow], tokenizer: Tokenizer) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._calls = itertools.count()

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, images: Sequence[Any] = ()
    ) -> GenerationResult:
        """One made-up continuation; its log-probs are all -1."""
        asked = next((r for r in self._rows if prompt_token_ids[: len(r.token_ids)] == r.token_ids), self._rows[0])
        text = str(asked.label) if next(self._calls) % 2 == 0 else "?"
        ids = self._tokenizer.encode(text, add_special_tokens=False) or [0]
        eos = self._tokenizer.eos_token_id
        ids = [*ids, eos] if eos is not None else ids
        finish = "stop" if sampling.max_tokens is None or len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        return GenerationResult(ids, [-1.0] * len(ids), finish)


def hooks_check(cfg: PPOConfig) -> Report:
    """Run the episodes of the first prompts with the hooks of the flags, as an engine's process would.

    Raises:
        DataError, ModelLoadError: prompts or tokenizer can't be had.
        RolloutError: a hook can't be called, no hook is named, or a failure is to stop the run.
    """
    named = [(flag, getattr(cfg, flag)) for flag in HOOKS if getattr(cfg, flag)]
    if not named:
        raise RolloutError(f"there is nothing to check: give any of {', '.join('--' + flag for flag in HOOKS)}")
    tokenizer = load_tokenizer(cfg.model_path, use_fast=not cfg.disable_fast_tokenizer)
    rows = load_prompts(cfg, tokenizer, max_tokens=prompt_limit(cfg))[:PROMPTS]
    select = BufferFilter(cfg.buffer_filter_path, cfg) if cfg.buffer_filter_path else None
    groups = asyncio.run(_roll_out(cfg, rows, LabelEngine(rows, tokenizer)))
    lines = [f"{len(rows)} prompts of {cfg.prompt_data} with {cfg.n_samples_per_prompt} made-up responses each", ""]
    lines += [f"{flag}  {path}" for flag, path in named]
    samples = [sample for group in groups for sample in group.trajectories]
    lengths = [sample.response_length for sample in samples]
    lines += ["", f"samples   {len(samples)}" + (f", {min(lengths)} to {max(lengths)} tokens" if lengths else "")]
    rewards = np.array([sample.reward for sample in samples if sample.reward is not None])
    if rewards.size:
        lines.append(f"rewards   {rewards.size}, mean {rewards.mean():.4g}, {rewards.min():.4g} to {rewards.max():.4g}")
    logs = sorted({name for sample in samples for name in sample.extra_logs})
    lines += [f"logs      {', '.join(logs)}"] if logs else []
    if cfg.dynamic_sampling_filter_path:
        verdicts = Counter(group.verdict.reason or "kept" for group in groups if group.verdict is not None)
        lines.append("groups    " + ", ".join(f"{name} {count}" for name, count in sorted(verdicts.items())))
    if select is not None:
        lines.append(f"buffer    {select(groups, (len(groups) + 1) // 2)} of {len(groups)} groups")
    failures = [failure.message for group in groups for failure in group.failures]
    failures += [f"--buffer_filter_path: {select.last_error}"] if select is not None and select.pop_failures() else []
    without = cfg.custom_generate_function_path and not (cfg.custom_rm_path or cfg.remote_rm_url or cfg.reward_pretrain)
    if without and rewards.size < len(samples):
        failures.append(f"{len(samples) - rewards.size} samples have no reward")
    lines.append(f"failures  {len(failures)}")
    lines += [f"  {message}" for message in list(dict.fromkeys(failures))[:_SHOWN_FAILURES]]
    return Report("\n".join(lines), len(failures))


async def _roll_out(cfg: PPOConfig, rows: Sequence[PromptRow], engine: LabelEngine) -> list[Group]:
    spec = replace(episode_spec(cfg), sampling=training_sampling(cfg))
    try:
        items = [prompt_item(row, index, 0) for index, row in enumerate(rows)]
        return await asyncio.gather(*(run_group(item, cfg.n_samples_per_prompt, engine, spec) for item in items))
    finally:
        if spec.rewards is not None:
            await spec.rewards.close()
