"""One of each hook, for prompts with a number as the label; see docs/hooks.md.

--custom_generate_function_path examples/python/hooks.py:generate
--custom_rm_path examples/python/hooks.py:reward
--custom_rm_path examples/python/hooks.py:group_reward --group_rm
--dynamic_sampling_filter_path examples/python/hooks.py:keep
--buffer_filter_path examples/python/hooks.py:hardest_first
"""

from __future__ import annotations

import re
from typing import Any

from openrlhf.utils.agent import DynamicFilterOutput, Sample

HINT = "?="


def last_number(text: str) -> str | None:
    """The last number of a text."""
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


async def generate(args: Any, sample: Sample, sampling_params: Any, *, llm_engine: Any, hf_tokenizer: Any) -> Sample:
    """Two attempts. After a wrong first one a hint is appended, which is not trained on."""
    hint = hf_tokenizer.encode(HINT, add_special_tokens=False)
    attempts = 0
    while True:
        output = (await llm_engine.generate(sample.tokens, sampling_params)).outputs[0]
        sample.append(output.token_ids, sampled=True)
        attempts += 1
        right = last_number(output.text) == str(sample.label)
        if right or attempts == 2 or len(sample.tokens) + len(hint) >= args.max_len:
            break
        sample.append(hint, sampled=False)
    sample.extra_logs["attempts"] = attempts
    return sample


def reward(args: Any, sample: Sample) -> dict[str, float]:
    """1 for the right number, 0.1 for another one, 0 without; the score counts right ones only."""
    answer = last_number(sample.response)
    right = answer == str(sample.label)
    return {"reward": 1.0 if right else 0.1 * (answer is not None), "score": float(right)}


def group_reward(args: Any, samples: list[Sample]) -> list[float]:
    """1 for the right number, and half as much again for the shortest right response to the prompt."""
    rewards = [reward(args, sample)["score"] for sample in samples]
    lengths = [sample.response_length for sample, right in zip(samples, rewards, strict=True) if right]
    return [
        1.5 * right if sample.response_length == min(lengths, default=0) else right
        for sample, right in zip(samples, rewards, strict=True)
    ]


def keep(args: Any, samples: list[Sample]) -> bool | DynamicFilterOutput:
    """Groups whose rewards differ. Others are used only when there are too few."""
    rewards = [sample.reward for sample in samples]
    if max(rewards) - min(rewards) > 1e-6:
        return True
    reason = "all_right" if min(rewards) >= 1 else "all_wrong"
    return DynamicFilterOutput(False, reason, keep_when_insufficient=True)


def hardest_first(args: Any, groups: list[list[Sample]], count: int) -> list[int]:
    """The groups with the lowest mean reward."""
    means = [sum(sample.reward for sample in group) / len(group) for group in groups]
    return sorted(range(len(groups)), key=lambda index: means[index])[:count]
