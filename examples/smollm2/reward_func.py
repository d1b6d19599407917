"""The reward: 1 if the response is the number alone, 0 for anything else."""

END = "<|im_end|>"


def reward_func(queries, prompts, labels, **kwargs):
    """Compare what follows each prompt with the label.

    Args:
        queries: prompt and response, special tokens included.
        prompts: the prompts.
        labels: the right answers.

    Returns:
        "rewards", one number a sample.
    """
    responses = [query[len(prompt) :].split(END)[0].strip() for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [float(text == label) for text, label in zip(responses, labels, strict=True)]}
