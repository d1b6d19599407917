"""Child process that compares mathematical answers: pairs of texts come through a pipe, verdicts go back.

math-verify guards itself with signals, which work in a main thread only, and some expressions keep it busy
for ever. So it runs here without its own time-outs, and the parent kills this process when a request takes
too long.
"""

from __future__ import annotations

import contextlib
import re
import sys
from multiprocessing.connection import Connection
from typing import Any

import math_verify

_NUMBER = r"[-+]?(?:\d[\d,]*)?\.?\d+(?:/\d+)?"
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,20})\s+(\d{1,20})/(\d{1,20})(?!\s*\^|[\w.]*\d)")
# Numbers with blanks between them, which math-verify adds up: "1 2" would be 3.
_SEPARATE = re.compile(rf"{_NUMBER}(?:\s+{_NUMBER.removeprefix('[-+]?')})+")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:\\?%|per\s?cent)\s*\}|\bper\s?cent\b)")
_PERCENT_NUMBER = re.compile(r"(?:(?:\d[\d,]*)?\.?\d+(?:/\d+)?|\d*\\[dt]?frac(?:\{[^{}]*\}|\d){2})\s*\\%")
# Units that may follow a number as bare words. Any other words may change its value, so math-verify gets those.
_UNIT = (
    "(?:millimet|centimet|decimet|kilomet|met|millilit|lit)(?:er|re)s?|mm|cm|dm|km|ml|inch(?:es)?|foot|feet|ft|yards?|yd|"
    "miles?|mi|acres?|hectares?|(?:milli|kilo)?grams?|mg|kg|tons?|tonnes?|ounces?|oz|pounds?|lbs?|gallons?|quarts?|pints?|"
    "cups?|teaspoons?|tablespoons?|bushels?|(?:milli)?seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|"
    "years?|yrs?|decades?|dollars?|cents?|euros?|pounds|rupees?|yen|usd|degrees?|radians?|rad|mph|kph|watts?|volts?|"
    "amperes?|newtons?|joules?|hertz|pascals?|units?|points?|times|people|persons?|children|kids|men|women|boys|girls|"
    "students|teachers|friends|books|pages|apples|oranges|eggs|cookies|candies|marbles|balls|cards|coins|tickets|"
    "pieces|items|boxes|bags|ways|cars|trees|flowers|animals|cats|dogs|chickens|sheep|cows|pencils|stickers|toys|games"
)
_WITH_UNIT = re.compile(
    rf"\s*({_NUMBER}|\d+\s+\d+/\d+)\s+(?:(?:square|cubic|sq|cu)\.?\s+)?(?:{_UNIT})(?:\s+(?:per|an?)\s+(?:{_UNIT}))?\s*",
    re.IGNORECASE,
)
# Words that change a number's value: math-verify drops them in \text{}, and where they follow one in plain text.
_SCALE_WORD = (
    r"(?:half|halves|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundre\w+|thousand\w*|"
    r"millions?|billions?|trillions?|dozens?|divided|modulo|squared|cubed|factorial)"
)
_VALUE_WORD = rf"\b(?:{_SCALE_WORD}|plus|minus|times|over|less|more|mod|choose)\b"
_SCALED_NUMBER = re.compile(rf"{_NUMBER.removeprefix('[-+]?')}\$*\s*\$*(?:\\text\{{\s*)?{_SCALE_WORD}\b\s*\}}?")
_SHORT_WORDS = frozenset("yes no one two six ten odd red".split())


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
    if _SEPARATE.fullmatch(gold) and (boxed is None or not _SEPARATE.fullmatch(_tidy(boxed[1]))):
        return False
    if boxed is None:
        found = _mixed_as_fractions(_percents_inside(text))
        if _answers_with(_SCALED_NUMBER, found):
            return False  # "5 million" is not 5
        percent = _answers_with(_PERCENT_NUMBER, found)
    else:
        found = _tidy(boxed[1])
        if (same := _same_words(gold, found)) is not None:
            return same
        if _SEPARATE.fullmatch(found):
            return gold.split() == found.split()
        gold, found = _without_modulus(gold, found)
        percent = _is_percent(found)
    percents = [_is_percent(gold), percent]
    gold, found = (
        _PERCENT.sub("", side) if is_one else side for side, is_one in zip((gold, found), percents, strict=True)
    )
    candidates = [(gold, found)]
    if percents == [True, False]:
        candidates.append((f"\\frac{{{gold}}}{{100}}", found))
    if percents == [False, True]:
        candidates.append((f"100 \\cdot ({gold})", found))
    return any(_equal(one, other, boxed is None) for one, other in candidates)


def _is_percent(answer: str) -> bool:
    """Tells whether an answer is a number of percent: the sign ends it, or belongs to its only number."""
    signs = list(_PERCENT.finditer(answer))
    return bool(signs) and (not answer[signs[-1].end() :].strip(" .$}") or len(re.findall(r"\d[\d.,]*", answer)) == 1)


def _percents_inside(response: str) -> str:
    """Writes percents in one way, with the sign inside the marks around a number."""
    response = _PERCENT.sub(lambda _: "\\%", response)
    return re.sub(r"(?<=\d)(\$+|\*\*|\s*\\\))\\%", r"\\%\1", response)


def _answers_with(form: re.Pattern[str], response: str) -> bool:
    """Tells whether the very answer math-verify finds has the form: with other numbers there, it is another answer."""
    number = "90173"
    while number in response:
        number += "1"
    probe, changed = form.subn(number, response)
    if not changed:
        return False
    answer = _parse(probe)
    return any(_same(_parse(f"\\boxed{{{sign}{number}}}"), answer) for sign in ("", "-"))


def _without_modulus(gold: str, found: str) -> tuple[str, str]:
    r"""Takes "\pmod{7}" off where one answer has it or both have the same."""
    form = re.compile(r"\s*(?:\\pmod\s*(?:\{([^{}]*)\}|(\d+))|\((?:\\mod|\\text\{mod\s*\}|mod)\s*(\w+)\))\s*\.?$")
    marks = [form.search(side) for side in (gold, found)]
    moduli = {"".join(filter(None, mark.groups())).strip() for mark in marks if mark}
    return (form.sub("", gold), form.sub("", found)) if len(moduli) == 1 else (gold, found)


def _equal(gold: str, found: str, is_response: bool) -> bool:
    return _same(_parse_gold(gold), _parse(found if is_response else f"\\boxed{{{found}}}"))


def _parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)


def _same(gold: list[Any], answer: list[Any]) -> bool:
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


def _parse_gold(text: str) -> list[Any]:
    """Parses a reference answer. A box takes bare LaTeX whole, where plain text gives its first number only."""
    marked = "$" in text or "\\boxed" in text
    prose = re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}", re.sub(r"\\text\{[^{}]*\}", "", text))
    if re.match(rf"\s*{_NUMBER}\s", text) and re.search(_VALUE_WORD, text):
        prose = None  # as in "5 divided by seven"
    forms = [text, f"\\boxed{{{text}}}"] if marked or prose else [f"\\boxed{{{text}}}", text]
    return _parse(forms[0]) or _parse(forms[1])


def _tidy(text: str) -> str:
    """Takes off marks around a whole answer, and writes numbers as math-verify reads them: without thin spaces between
    digits, signs of degrees and plain units."""
    text = text.strip()
    if whole := re.fullmatch(r"\$+([^$]*)\$+|\\boxed\{([^{}]*)\}", text):
        text = (whole[1] or whole[2] or "").strip()
    text = re.sub(r"(?<=\d)(?:,\\!|\\[,!:;]|\{,\})\s*(?=\d{3})", "", text).replace("°", "^\\circ")
    text = re.sub(r"(?<=\d)(?:\\[,!:;]|\\q?quad\b)\s*(?=\d)", " ", text)
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", lambda m: m[1] if re.search(_VALUE_WORD, m[1]) else m[0], text)
    unit = None if _PERCENT.search(text) else _WITH_UNIT.fullmatch(text.rstrip("."))
    return _mixed_as_fractions(unit[1] if unit else text)


def _mixed_as_fractions(text: str) -> str:
    """Writes 2 1/2 as 5/2; math-verify reads it as 3/2."""
    return _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)


def _same_words(gold: str, found: str) -> bool | None:
    r"""Compares two answers that are nothing but words; None if they are anything else.

    As products of letters, "silent" equals "listen". But abc is a product, and equals bca.
    """
    marked = [re.fullmatch(r"\s*\\(?:text|textbf|mathrm)\{([^{}]*)\}\s*\.?", side) for side in (gold, found)]
    plain = [mark[1] if mark else side for mark, side in zip(marked, (gold, found), strict=True)]
    words = [" ".join(side.strip(" .$").casefold().split()) for side in plain]
    if not all(re.fullmatch(r"[a-z' -]{2,}", side) for side in words):
        return None
    return words[0] == words[1] if any(marked) or any(map(_is_word, words)) else None


def _is_word(text: str) -> bool:
    is_long = len(text) > 3 and re.search("[aeiou]", text) is not None and not re.fullmatch(r"[abcdxyz]+|[uvw]+", text)
    return is_long or text in _SHORT_WORDS


def main() -> None:
    """Serves requests until the other end of the pipe, whose descriptor is the argument, is closed."""
    pipe = Connection(int(sys.argv[1]))
    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            gold, response = pipe.recv()
            try:
                same = same_answer(gold, response)
            except Exception:  # whatever the parser makes of model output: it equals nothing
                same = False
            pipe.send(same)


if __name__ == "__main__":
    main()
