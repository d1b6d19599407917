"""Child process that compares mathematical answers: one JSON request a line in, one JSON reply a line out.

math-verify guards itself with signals, which work in a main thread only, and some expressions keep it busy
for ever. So it runs here without its own time-outs, and the parent kills this process when a request takes
too long.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

_NUMBER = r"[-+]?(?:\d[\d,]*)?\.?\d+(?:/\d+)?"
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|per\s?cent)\s*\}|\bper\s?cent\b)")
# Words after a number that are no unit: they change its value, or join it to something.
_NO_UNIT = r"and|or|to|sin|cos|tan|log|exp|sqrt|hundred|thousand|million|billion|trillion|dozen|choose|factorial"
_WITH_UNIT = re.compile(rf"\s*({_NUMBER})\s+(?!(?:{_NO_UNIT})\b)[A-Za-z]{{3,}}(?:\s+(?!(?:{_NO_UNIT})\b)[A-Za-z]+)*\s*")


def same_answer(gold: str, text: str) -> bool:
    r"""Tells whether the answer found in `text` equals `gold`.

    A percent sign on both sides is left out. On one side only, the number may be meant as it stands or as
    hundredths: 50% equals 50 and 0.5.

    Args:
        gold: a reference answer: bare LaTeX, text with the answer in dollars or a box, or "... #### answer".
        text: a response, or its answer in ``\boxed{}``.
    """
    gold = _tidy(gold.rpartition("####")[2])
    boxed = re.fullmatch(r"\\boxed\{(.*)\}", text, re.DOTALL)
    answer = _tidy(boxed[1]) if boxed else None
    if answer is not None and (words := _words(gold)) and (said := _words(answer)):
        return words == said  # as products of letters, "silent" equals "listen"
    found = text if answer is None else answer
    percents = [_PERCENT.search(side) is not None for side in (gold, found)]
    gold, found = (_PERCENT.sub("", side) for side in (gold, found))
    candidates = [(gold, found)]
    if percents == [True, False]:
        candidates.append((f"\\frac{{{gold}}}{{100}}", found))
    if percents == [False, True]:
        candidates.append((f"100 \\cdot ({gold})", found))
    return any(_equal(one, other, answer is None) for one, other in candidates)


def _equal(gold: str, found: str, is_response: bool) -> bool:
    from math_verify import parse, verify

    given = parse(found, parsing_timeout=None) if is_response else parse(f"\\boxed{{{found}}}", parsing_timeout=None)
    return bool(verify(_parse_gold(gold), given, timeout_seconds=None))


def _parse_gold(text: str) -> list[Any]:
    """Parses a reference answer. A box takes bare LaTeX whole, where plain text gives its first number only."""
    from math_verify import parse

    marked = "$" in text or "\\boxed" in text
    prose = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}", re.sub(r"\\text\{[^{}]*\}", "", text))
    forms = [text, f"\\boxed{{{text}}}"] if marked or prose else [f"\\boxed{{{text}}}", text]
    return parse(forms[0], parsing_timeout=None) or parse(forms[1], parsing_timeout=None)


def _tidy(text: str) -> str:
    """Takes off marks around a whole answer, and writes numbers as math-verify reads them: without thin spaces between
    digits, signs of degrees and plain units."""
    text = text.strip()
    if whole := re.fullmatch(r"\$+([^$]*)\$+|\\boxed\{([^{}]*)\}", text):
        text = (whole[1] or whole[2] or "").strip()
    text = re.sub(r"(?<=\d)(?:,\\!|\\[,!:;]|\{,\})\s*(?=\d{3})", "", text).replace("°", "^\\circ")
    unit = None if _PERCENT.search(text) else _WITH_UNIT.fullmatch(text.rstrip("."))
    return unit[1] if unit else text


def _words(text: str) -> str | None:
    r"""The words of an answer that is nothing else: in ``\text{}`` or of three letters and more; else None."""
    inner = re.fullmatch(r"\s*\\(?:text|textbf|mathrm)\{([^{}]*)\}\s*\.?", text)
    words = (inner[1] if inner else text).strip(" .$").casefold()
    least = 2 if inner else 3
    return " ".join(words.split()) if re.fullmatch(rf"[a-z' -]{{{least},}}", words) else None


def main() -> None:
    """Serves requests until standard input ends."""
    import math_verify  # noqa: F401 - loaded before the first request, whose time is limited

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply: dict[str, Any] = {"same": same_answer(request["gold"], request["response"])}
        except Exception as error:  # whatever the parser makes of model output; the parent counts it
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
