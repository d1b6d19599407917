"""A reward function: is the last number of the response the right one?

Use: --remote_rm_url examples/python/reward_func.py --label_key <column with the right number>
"""

import re

import torch

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reward_func(queries, prompts, labels, **kwargs):
    """Scores a batch of samples.

    Args:
        queries: prompt + response texts.
        prompts: prompt texts.
        labels: values of the label column.
        kwargs: "metadata", one dict per sample (datasource, response, truncated, ...).

    Returns:
        "rewards" for the advantages, "scores" for dynamic filtering, "extra_logs" for the log.
    """
    rewards, answered = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        numbers = NUMBER.findall(query[len(prompt) :])
        answered.append(float(bool(numbers)))
        rewards.append(float(bool(numbers) and float(numbers[-1]) == float(label)))
    rewards = torch.tensor(rewards)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"answered": torch.tensor(answered)}}
