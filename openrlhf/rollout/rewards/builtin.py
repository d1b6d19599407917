"""Ready-made verifiable rewards, usable as `reward_func` in a file of one's own.

.. code-block:: python

    from openrlhf.rollout.rewards.builtin import math_reward as reward_func
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from openrlhf.rollout.rewards.math_check import MathTimeout, shared_checker


def exact_match_reward(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **kwargs: Any
) -> dict[str, Any]:
    """1.0 where the response equals the label, blanks and end-of-sequence text aside; else 0.0."""
    responses = [_response(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [float(r == str(label).strip()) for r, label in zip(responses, labels, strict=True)]}


def math_reward(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
    r"""1.0 where the response's answer equals the label as mathematics; else 0.0.

    The answer is the last ``\boxed{}`` if there is one; otherwise what math-verify finds in the text after
    the last "</think>". Comparisons have a time limit of their own; one that exceeds it counts as wrong and
    shows in the extra log ``math_timeout``.
    """
    rewards, timeouts, boxed = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = _response(query, prompt).rpartition("</think>")[2]
        answer = extract_boxed_answer(response)
        late = 0.0
        try:
            correct = answers_agree(f"\\boxed{{{answer}}}" if answer is not None else response, answer, str(label))
        except MathTimeout:
            correct, late = False, 1.0
        rewards.append(float(correct))
        timeouts.append(late)
        boxed.append(float(answer is not None))
    return {"rewards": rewards, "extra_logs": {"math_timeout": timeouts, "boxed": boxed}}


def answers_agree(text: str, answer: str | None, label: str) -> bool:
    """Compares plainly first, and by math-verify where that says no.

    Args:
        text: what math-verify looks for an answer in.
        answer: the answer alone, if it is known.
        label: the reference answer.

    Raises:
        MathTimeout: the comparison took too long.
    """
    plain = answer if answer is not None else text
    if same_plain_answer(plain, label):
        return True
    return shared_checker().same(label, text)


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """Tells whether an extracted answer equals the reference answer, as text, number or mathematics.

    Both may be texts or numbers; None equals nothing.
    """
    if given_answer is None or ground_truth is None:
        return False
    answer = str(given_answer)
    try:
        return answers_agree(f"\\boxed{{{answer}}}", answer, str(ground_truth))
    except MathTimeout:
        return False


def extract_boxed_answer(text: str) -> str | None:
    r"""Returns what the last ``\boxed{...}`` or ``\fbox{...}`` holds, braces balanced; None without one."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def plain_answer(response: str) -> str | Fraction:
    r"""What a response answers, to be compared with other responses: equal answers are equal.

    The last ``\\boxed{}`` after the last "</think>" if there is one, else all text there; a number where it is one.
    """
    text = without_end(response).rpartition("</think>")[2]
    boxed = extract_boxed_answer(text)
    plain = _normal(text if boxed is None else boxed)
    number = _number(plain)
    return plain if number is None else number


def same_plain_answer(answer: str, label: str) -> bool:
    """Compares two answers as text without layout, and as numbers (1,234 = 1234; 0.5 = 1/2)."""
    left, right = _normal(answer), _normal(label)
    if left == right:
        return bool(left)
    numbers = _number(left), _number(right)
    return None not in numbers and numbers[0] == numbers[1]


def _normal(text: str) -> str:
    text = re.sub(r"\\(left|right|displaystyle)(?![A-Za-z])", "", text.strip())
    text = re.sub(r"(?<=\d)\\[,;:!]\s*(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\(?:[,;:!]|q?quad(?![A-Za-z]))", " ", text)
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = " ".join(text.strip("$ ").rstrip(".").split())
    # A blank between two numbers stays: 1 2 is not 12, and 1, 234 is not 1,234.
    return re.sub(r"(?<![\d.])(?<!\d,) | (?![\d.]|,\d{3}(?!\d))|(?<=,) (?!\d{3}(?!\d))", "", text)


def _number(text: str) -> Fraction | None:
    plain = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)
    # A plain form only: Fraction("1e999999999") would compute for ever.
    if mixed := re.fullmatch(r"([+-]?)(\d{1,100}) (\d{1,100})/(\d{1,100})", plain):
        sign, whole, above, below = mixed.groups()
        size = int(whole) + Fraction(int(above), int(below)) if int(below) else None
        return -size if size is not None and sign == "-" else size
    if not re.fullmatch(r"[+-]?\d{1,100}(\.\d{1,100})?(/\d{1,100})?", plain):
        return None
    numerator, _, denominator = plain.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator or 1)


def _response(query: str, prompt: str) -> str:
    return without_end(query[len(prompt) :] if query.startswith(prompt) else query)


def without_end(response: str) -> str:
    """A response without the text of its end-of-sequence token: <eos>, </s>, <|im_end|>, <|endoftext|> ..."""
    return re.sub(r"(<\|[^|<>]*\|>|</s>|<eos>)\s*$", "", response.strip()).strip()
