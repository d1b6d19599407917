"""The demo's task: add two numbers between 10 and 49, as learned from a careless teacher.

The teacher of the supervised stage often forgets to carry: 27+15 becomes 32. Imitation learns the mistake with the
sums. Reinforcement learning sees only whether an answer is right, and unlearns it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

CHARACTERS = "0123456789+="
LOWEST, HIGHEST = 10, 49
FORGETS = 0.65
"""How often the teacher forgets to carry, where there is something to carry."""
PLAIN_SHARE = 0.6
"""Share of the problems without a carry that are used, so that carrying matters in more than half of all."""

Problem = tuple[int, int]


def carries(problem: Problem) -> bool:
    """Whether the ones add up to ten or more."""
    first, second = problem
    return first % 10 + second % 10 >= 10


def careless_answer(problem: Problem) -> int:
    """The sum without the carry from the ones to the tens."""
    return sum(problem) - (10 if carries(problem) else 0)


def prompt(problem: Problem) -> str:
    """The text before the answer."""
    return f"{problem[0]}+{problem[1]}="


def split_problems(seed: int, held_out: int) -> tuple[list[Problem], list[Problem]]:
    """All problems in a random order, as (training, held out); no problem is in both."""
    rng = random.Random(seed)
    numbers = range(LOWEST, HIGHEST + 1)
    problems = [(first, second) for first in numbers for second in numbers]
    problems = [problem for problem in problems if carries(problem) or rng.random() < PLAIN_SHARE]
    rng.shuffle(problems)
    return problems[held_out:], problems[:held_out]


def write_data(folder: Path, seed: int, sft_rows: int, rl_rows: int, held_out: int) -> None:
    """Write sft.jsonl (the teacher's answers), rl.jsonl and held_out.jsonl (right answers as labels).

    Rows of the first two are drawn from the training problems with repetition; the teacher's mistakes are drawn
    anew each time.
    """
    training, held = split_problems(seed, held_out)
    rng = random.Random(seed + 1)
    lessons = rng.choices(training, k=sft_rows)
    answers = [careless_answer(p) if rng.random() < FORGETS else sum(p) for p in lessons]
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "sft.jsonl",
        ({"input": prompt(p), "output": str(answer)} for p, answer in zip(lessons, answers, strict=True)),
    )
    exercises = [
        problem for _ in range(-(-rl_rows // len(training))) for problem in rng.sample(training, len(training))
    ]
    _write(folder / "rl.jsonl", map(_exercise, exercises[:rl_rows]))
    _write(folder / "held_out.jsonl", map(_exercise, held))


def _exercise(problem: Problem) -> dict[str, str]:
    return {"input": prompt(problem), "answer": str(sum(problem))}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
