"""The reward: 1 if the response is the right number alone, 0.5 if that number comes last in other words, else 0.

The half is a step on the way: at the start the model writes "2 + 6 = 8" far more often than "8".
"""

import re

END = "<|im_end|>"
NUMBER = re.compile(r"-?\d+")


def reward_func(queries, prompts, labels, **kwargs):
    """Compare what follows each prompt with the label.

    Args:
        queries: prompt and response, special tokens included.
        prompts: the prompts.
        labels: the right answers.

    Returns:
        "rewards", one number a sample, and as "extra_logs" how often the number was right and stood alone.
    """
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards, exact = [], []
    for response, label in zip(responses, labels, strict=True):
        text, ended, _ = response.partition(END)
        numbers = NUMBER.findall(text)
        right = bool(ended) and bool(numbers) and numbers[-1] == label
        exact.append(float(right and text.strip() == label))
        rewards.append(max(exact[-1], 0.5 * right))
    return {"rewards": rewards, "extra_logs": {"exact": exact}}
