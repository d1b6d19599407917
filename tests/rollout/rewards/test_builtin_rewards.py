"""Built-in verifiable rewards."""

from __future__ import annotations

import subprocess
import sys
import time
from fractions import Fraction

import pytest
from process_ends import ends

import openrlhf.utils
from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards.builtin import (
    exact_match_reward,
    extract_boxed_answer,
    grade_answer,
    math_reward,
    plain_answer,
    same_plain_answer,
)
from openrlhf.rollout.rewards.math_check import MathChecker, MathTimeout


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{ 7 }", "7"),
        ("no box", None),
        (r"\boxed{never closed", None),
    ],
)
def test_boxed_answers(text: str, answer: str | None) -> None:
    assert extract_boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "label", "same"),
    [
        ("1,234", "1234", True),
        ("0.5", "1/2", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\text{Monday}.", "Monday", True),
        ("$ 7 $", "7", True),
        ("1,2", "12", False),
        ("1/0", "1", False),
        ("", "", False),
        ("1e9", "1000000000", False),
    ],
)
def test_plain_comparison(answer: str, label: str, same: bool) -> None:
    assert same_plain_answer(answer, label) is same


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1 1/2}<eos>", Fraction(3, 2)),
        (r"\boxed{-1 1/2}", Fraction(-3, 2)),
        (r"\boxed{1 1/0}", "1 1/0"),
        (r"\boxed{2} <think>\boxed{1}</think> no, \boxed{-0.5}", Fraction(-1, 2)),
        (r"\boxed{12\,345}", Fraction(12345)),
        (r"\boxed{\displaystyle 7}", Fraction(7)),
        (r"\boxed{\left( 1, x \right)}", "(1,x)"),
        (r"\boxed{\leftarrow}", r"\leftarrow"),
        (r"\boxed{a\quad \text{b}}", "ab"),
        (r"\boxed{\dfrac{1}{x}}", r"\frac{1}{x}"),
        ("  yes. </s>", "yes"),
    ],
)
def test_answers_that_are_voted_on(response: str, answer: str | Fraction) -> None:
    assert plain_answer(response) == answer


def test_exact_match() -> None:
    reply = exact_match_reward(["q: yes</s>", "q: yes<|im_end|>\n", "q: no"], ["q:"] * 3, ["yes", "yes ", "yes"])
    assert reply == {"rewards": [1.0, 1.0, 0.0]}


def test_math_reward_compares_mathematics() -> None:
    responses = [
        r"<think>\boxed{9}</think> so \boxed{\frac{2}{4}}<|im_end|>",
        "The answer is $x^2+2x+1$.",
        r"\boxed{3}",
        "no idea",
    ]
    reply = math_reward(["p" + r for r in responses], ["p"] * 4, [r"\frac{1}{2}", "(x+1)^2", "4", 5])
    assert reply["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert reply["extra_logs"] == {"math_timeout": [0.0] * 4, "boxed": [1.0, 0.0, 1.0, 0.0]}


def test_grade_answer_is_found_under_utils() -> None:
    assert openrlhf.utils.grade_answer is grade_answer
    assert openrlhf.utils.extract_boxed_answer is extract_boxed_answer
    assert grade_answer("0.25", r"\frac{1}{4}") and not grade_answer(None, "1")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        openrlhf.utils.nothing  # noqa: B018


def test_endless_comparison_is_ended_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = MathChecker(workers=1, timeout=60.0)
    try:
        assert checker.same("2", "$2$")
        with monkeypatch.context() as hasty:
            hasty.setattr(checker, "_timeout", 2.0)
            started = time.monotonic()
            with pytest.raises(MathTimeout, match="no verdict within 2 s"):
                checker.same("2", r"$((99999^{99999})^{99999})^{99999}$")
        assert time.monotonic() - started < 30
        assert checker.same("2", "$2$") and not checker.same("2", "$3$")
    finally:
        checker.close()


def test_a_process_that_cannot_be_started_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(RewardError, match="no process for math answers could be started: .*Resource temporarily"):
        MathChecker(workers=1).same("2", "$2$")


def test_no_child_process_outlives_its_parent() -> None:
    code = (
        "from openrlhf.rollout.rewards import math_check\n"
        "checker = math_check.shared_checker()\n"
        "assert checker.same('2', '$2$')\n"
        "print(*[worker._process.pid for worker in checker._all])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ends(int(done.stdout))
