"""The demo's reward: 1 for exactly the right number, 0 for anything else."""

EOS = "<eos>"


def reward_func(queries, prompts, labels, **kwargs):
    """Compare what follows each prompt with the label.

    Args:
        queries: prompt and response, special tokens included.
        prompts: the prompts.
        labels: the right answers.

    Returns:
        "rewards", one number a sample.
    """
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        rewards.append(float(query[len(prompt) :] == label + EOS))
    return {"rewards": rewards}
