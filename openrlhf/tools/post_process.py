"""What is made of scored rows: rejection sampling, pairs for DPO, prompts that ask for a score."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.tools.errors import ToolError
from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)

Row = dict[str, Any]
DEFAULT_REWARD_TEMPLATE = "{input} <rm_score>: {reward} "


def by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows with the same ``input`` together, in the order of their first appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["input"], []).append(row)
    return list(groups.values())


def rejection_sampling(rows: Sequence[Row]) -> list[Row]:
    """The row with the highest reward of each prompt (the first of equals): https://arxiv.org/abs/2307.09288."""
    return [max(group, key=lambda row: row["reward"]) for group in by_prompt(rows)]


def dpo_pairs(rows: Sequence[Row]) -> list[Row]:
    """The best and the worst response to each prompt; prompts whose responses are all equally good are left out.

    Raises:
        ToolError: no pair is left.
    """
    pairs = []
    groups = by_prompt(rows)
    for group in groups:
        best = max(group, key=lambda row: row["reward"])
        worst = min(group, key=lambda row: row["reward"])
        if best["reward"] == worst["reward"]:
            continue
        pairs.append(
            {
                "prompt": best["input"],
                "chosen": best["output"],
                "chosen_reward": best["reward"],
                "rejected": worst["output"],
                "rejected_reward": worst["reward"],
            }
        )
    if not pairs:
        raise ToolError(
            f"iter_dpo: none of the {len(groups)} prompts has two responses of different reward; generate several "
            "responses to each with --best_of_n"
        )
    if len(pairs) < len(groups):
        logger.warning(
            "iter_dpo: %d of %d prompts have no pair and are left out", len(groups) - len(pairs), len(groups)
        )
    return pairs


def conditional_sft(rows: Sequence[Row], template: str | None, normalize: bool) -> list[Row]:
    """The rewards, with two decimals, in the prompts: https://arxiv.org/abs/2310.05344.

    Args:
        template: has ``{input}`` and ``{reward}``.
        normalize: rewards with mean 0 and standard deviation 1 over all rows.
    """
    rewards = [float(row["reward"]) for row in rows]
    if normalize:
        mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
        rewards = [(reward - mean) / (spread or 1.0) for reward in rewards]
    before, _, rest = (template or DEFAULT_REWARD_TEMPLATE).partition("{input}")

    def fill(text: str, reward: float) -> str:
        # Not str.format: prompts and templates may have other braces.
        number = f"{reward:.2f}"
        return before.replace("{reward}", number) + text + rest.replace("{reward}", number)

    return [{**row, "input": fill(row["input"], reward)} for row, reward in zip(rows, rewards, strict=True)]


def post_process(rows: list[Row], name: str | None, template: str | None, normalize: bool) -> list[Row]:
    """The rows that ``--post_processor`` makes."""
    processors: dict[str, Callable[[], list[Row]]] = {
        "rs": lambda: rejection_sampling(rows),
        "iter_dpo": lambda: dpo_pairs(rows),
        "csft": lambda: conditional_sft(rows, template, normalize),
    }
    return rows if name in (None, "null") else processors[str(name)]()
