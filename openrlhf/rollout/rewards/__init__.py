"""Reward sources: a Python function, HTTP servers, built-in checks, and weighted sums of them."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.config.problems import FlagValueError
from openrlhf.config.reward_sources import BUILTIN_PREFIX, is_url, parse_reward_sources, parse_reward_weights
from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards import builtin
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, RewardSource
from openrlhf.rollout.rewards.client import RewardClient
from openrlhf.rollout.rewards.function import FunctionReward
from openrlhf.rollout.rewards.http import HTTPOptions, HTTPReward
from openrlhf.rollout.rewards.weighted import WeightedReward

__all__ = [
    "FunctionReward",
    "HTTPOptions",
    "HTTPReward",
    "RewardClient",
    "RewardError",
    "RewardRequest",
    "RewardResult",
    "RewardSource",
    "WeightedReward",
    "make_reward_source",
]


def make_reward_source(remote_rm_url: str | Sequence[str], weights: str | None = None) -> RewardSource:
    """Builds the reward source that `--remote_rm_url` and `--reward_weights` name.

    Args:
        remote_rm_url: one .py file that defines `reward_func`, ``builtin:<name>``, or one or several URLs (a list, or
            a text with commas between them); or several of these as ``name=entry``, whose weighted sum is the reward.
        weights: ``name=number`` with commas between them.

    Raises:
        RewardError: what can't be meant, or a file that can't be used.
    """
    try:
        entries = parse_reward_sources(remote_rm_url)
        factors = parse_reward_weights(weights, entries)
    except FlagValueError as error:
        raise RewardError(f"--remote_rm_url, --reward_weights: {error}") from error
    if list(entries) in ([], [""]):
        return _one_source(entries.get("", []), "reward_func")
    sources = {name: _one_source(places, f"reward_func_{name}") for name, places in entries.items()}
    return WeightedReward(sources, factors)


def _one_source(entries: Sequence[str], module_name: str) -> RewardSource:
    if len(entries) == 1 and entries[0].startswith(BUILTIN_PREFIX):
        return FunctionReward(getattr(builtin, f"{entries[0].removeprefix(BUILTIN_PREFIX)}_reward"))
    if len(entries) == 1 and entries[0].endswith(".py") and not is_url(entries[0]):
        return FunctionReward.from_file(entries[0], module_name=module_name)
    return HTTPReward(entries)
