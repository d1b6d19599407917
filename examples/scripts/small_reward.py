"""The reward of small forms whose groups must differ: the share of digits in a response, more than 0, less than 1."""


def reward_func(queries, prompts, labels, **kwargs):
    """Count digits; every sample of a random model has a chance of some.

    Returns:
        "rewards", one number a sample.
    """
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [(1 + sum(map(str.isdigit, text))) / (2 + len(text)) for text in responses]}
