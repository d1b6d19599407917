"""What --remote_rm_url and --reward_weights mean: one reward, or several by name with their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from openrlhf.config.problems import FlagValueError

BUILTIN_REWARDS = ("exact_match", "math")
BUILTIN_PREFIX = "builtin:"
_NAMED = re.compile(r"([A-Za-z][\w-]*)=(.+)")


def is_url(entry: str) -> bool:
    """Whether an entry is the address of a server."""
    return entry.startswith(("http://", "https://"))


def parse_reward_sources(value: str | Sequence[str]) -> dict[str, list[str]]:
    """The entries of --remote_rm_url by the name of their reward.

    An entry is a URL, a .py file or ``builtin:<name>``. Several URLs of one name are servers of the same reward.

    Args:
        value: entries with commas between them, or a list; all of them as ``name=entry``, or none.

    Returns:
        Entries by name; the only name is "" where none is given.

    Raises:
        FlagValueError: what can't be meant.
    """
    raw = value.split(",") if isinstance(value, str) else value
    entries = [entry.strip() for entry in raw if entry.strip()]
    sources: dict[str, list[str]] = {}
    for entry in entries:
        named = _NAMED.fullmatch(entry)
        name, place = (named[1], named[2]) if named else ("", entry)
        sources.setdefault(name, []).append(place)
    if len(sources) > 1 and "" in sources:
        raise FlagValueError(
            f"{sources[''][0]!r} has no name beside entries that have one", "name all of them, or none"
        )
    for places in sources.values():
        others = [place for place in places if not is_url(place)]
        if others and len(places) > 1:
            raise FlagValueError(
                f"{', '.join(map(repr, others))} in a list of several: a list holds URLs only",
                "write one .py file, or URLs that begin with http:// or https://; several rewards that add up have "
                "names: accuracy=./a.py,format=./b.py",
            )
        for place in others:
            builtin = place.removeprefix(BUILTIN_PREFIX)
            if builtin != place and builtin not in BUILTIN_REWARDS:
                choices = ", ".join(BUILTIN_PREFIX + known for known in BUILTIN_REWARDS)
                raise FlagValueError(f"{place!r} is not a reward that is built in", f"it is one of {choices}")
        for place in filter(is_url, places):
            _check_url(place)
    return sources


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # reading it checks it
        problem = "" if parts.hostname else "there is no host"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise FlagValueError(f"{url!r} is no address of a server: {problem}", "write http://host:port/path")


def parse_reward_weights(text: str | None, names: Iterable[str]) -> dict[str, float]:
    """The weight of each named reward; 1 for all without --reward_weights.

    Raises:
        FlagValueError: a weight that is not a finite number, a name without a weight, or the other way round.
    """
    names = list(names)
    if text is None:
        return dict.fromkeys(names, 1.0)
    if names in ([], [""]):
        raise FlagValueError(
            "weighs rewards by their names, and there are none",
            "name them: --remote_rm_url accuracy=./a.py,format=./b.py",
        )
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight) or name in weights:
            raise FlagValueError(
                f"{part.strip()!r} is no weight of its own", "write name=number for each: accuracy=0.7,format=0.3"
            )
        weights[name] = weight
    if weights.keys() != set(names):
        raise FlagValueError(
            f"has weights of {', '.join(weights)}, and --remote_rm_url has {', '.join(names)}",
            "give each reward one weight (0 only logs it)",
        )
    return {name: weights[name] for name in names}
