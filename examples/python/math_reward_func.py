r"""A reward function for mathematics: compares the answer in \boxed{} with the label as mathematics.

Use: --remote_rm_url examples/python/math_reward_func.py --label_key <column with the reference answer>
"""

from openrlhf.rollout.rewards.builtin import math_reward

# A small reward for keeping to the format helps a model that hardly ever boxes its answer at the start.
FORMAT_REWARD = 0.1


def reward_func(queries, prompts, labels, **kwargs):
    """1.0 for a right answer, 0.1 for a wrong one in a box, 0.0 otherwise; filtering looks at right or wrong."""
    reply = math_reward(queries, prompts, labels)
    correct, boxed = reply["rewards"], reply["extra_logs"]["boxed"]
    rewards = [max(right, FORMAT_REWARD * box) for right, box in zip(correct, boxed, strict=True)]
    return {"rewards": rewards, "scores": correct, "extra_logs": {**reply["extra_logs"], "correct": correct}}
