"""Reward sources: a Python function, HTTP servers, and built-in checks."""

from __future__ import annotations

from collections.abc import Sequence

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, RewardSource
from openrlhf.rollout.rewards.client import RewardClient
from openrlhf.rollout.rewards.function import FunctionReward
from openrlhf.rollout.rewards.http import HTTPOptions, HTTPReward

__all__ = [
    "FunctionReward",
    "HTTPOptions",
    "HTTPReward",
    "RewardClient",
    "RewardError",
    "RewardRequest",
    "RewardResult",
    "RewardSource",
    "make_reward_source",
]


def make_reward_source(remote_rm_url: str | Sequence[str], http: HTTPOptions | None = None) -> RewardSource:
    """Builds the reward source that `--remote_rm_url` names.

    Args:
        remote_rm_url: one .py file that defines `reward_func`, or one or several URLs (a list, or a text with
            commas between them).
        http: options for URLs.

    Raises:
        RewardError: a file among several entries, or an entry that is neither a .py file nor a URL.
    """
    raw = remote_rm_url.split(",") if isinstance(remote_rm_url, str) else list(remote_rm_url)
    entries = [entry.strip() for entry in raw if entry.strip()]
    files = [entry for entry in entries if entry.endswith(".py") and "://" not in entry]
    if files and len(entries) > 1:
        raise RewardError(f"--remote_rm_url takes one .py file or several URLs, not {entries}")
    if files:
        return FunctionReward.from_file(files[0])
    return HTTPReward(entries, http)
