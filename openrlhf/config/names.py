"""Which flag a written name means: underscores, dashes, dots, retired spellings, prefixes and near misses.

Dashes, dots and underscores are the same to us, so ``--zero-stage`` is ``--zero_stage`` and
``--actor.max_norm`` is ``--actor_max_norm``. Names are kept in a table under their underscore form.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from typing import Any

from openrlhf.config.flag import flag_specs


@dataclass(frozen=True)
class Retired:
    """A flag that is gone: the flag it became, and the value it stood for."""

    flag: str
    value: Any
    note: str


RETIRED: dict[str, Retired] = {
    "bf16": Retired("param_dtype", "bf16", "--bf16 is --param_dtype bf16 today"),
    "flash_attn": Retired(
        "attn_implementation", "auto", "--flash_attn is --attn_implementation auto, the default, today"
    ),
    "vllm_enable_is_correction": Retired(
        "enable_vllm_is_correction", True, "--vllm_enable_is_correction is spelled --enable_vllm_is_correction"
    ),
}


@dataclass(frozen=True)
class Target:
    """What a spelling means.

    Attributes:
        flag: canonical name of the flag.
        negated: the spelling switches it off.
        retired: set for retired spellings.
        actor_only: the spelling concerns the actor although the flag is also the critic's default.
    """

    flag: str
    negated: bool = False
    retired: Retired | None = None
    actor_only: bool = False


class UnknownName(Exception):
    """A name that is no flag; `close` are the canonical names that look most like it."""

    def __init__(self, name: str, close: list[str], ambiguous: bool) -> None:
        self.name, self.close, self.ambiguous = name, close, ambiguous
        super().__init__(name)


def underscored(name: str) -> str:
    """The form under which the table keeps a name."""
    return name.replace("-", "_").replace(".", "_")


@functools.cache
def name_table(config_class: type) -> dict[str, Target]:
    """Every spelling that the command accepts, in underscore form."""
    specs = flag_specs(config_class)
    table: dict[str, Target] = {name: Target(name) for name in specs}
    for name, spec in specs.items():
        for dotted in (*spec.info.dotted, *spec.info.negated):
            # Both "adam.lr" and "actor.adam.lr" name one flag; only the second leaves the critic alone.
            actor_only = dotted.startswith("actor.") and f"critic_{name}" in specs
            _add(table, underscored(dotted), Target(name, dotted in spec.info.negated, actor_only=actor_only))
    for spelling, retired in RETIRED.items():
        if retired.flag in specs:
            _add(table, spelling, Target(retired.flag, retired=retired))
    return table


def _add(table: dict[str, Target], spelling: str, target: Target) -> None:
    if spelling in table and table[spelling].flag != target.flag:
        raise ValueError(f"{spelling} would mean both {table[spelling].flag} and {target.flag}")
    table.setdefault(spelling, target)


def resolve(config_class: type, name: str, prefixes: bool = True) -> Target:
    """The flag that `name` (without leading dashes) means; unique beginnings of names will do.

    A beginning that was unique among OpenRLHF 0.9.10's flags stays so, whatever has been added since.

    Raises:
        UnknownName: if it means none, or several.
    """
    table = name_table(config_class)
    key = underscored(name)
    if key in table:
        return table[key]
    if prefixes and key:
        specs = flag_specs(config_class)
        tiers = ([n for n, spec in specs.items() if spec.info.since == "0.9"], list(table))
        for tier in tiers:
            matches = {table[n] for n in tier if n.startswith(key)}
            if len({match.flag for match in matches}) == 1:
                return min(matches, key=lambda target: (target.negated, target.actor_only))
            if matches:
                raise UnknownName(name, sorted({match.flag for match in matches}), ambiguous=True)
    raise UnknownName(name, close_names(config_class, name), ambiguous=False)


def close_names(config_class: type, name: str) -> list[str]:
    """Up to three flags whose spellings look most like `name`, best first."""
    table = name_table(config_class)
    key = underscored(name)
    scores: dict[str, float] = {}
    words = set(key.split("_"))
    for spelling, target in table.items():
        likeness = difflib.SequenceMatcher(None, key, spelling).ratio()
        shared = words & set(spelling.split("_"))
        likeness = max(likeness, 0.9 * len(shared) / max(len(words), len(spelling.split("_"))))
        scores[target.flag] = max(scores.get(target.flag, 0.0), likeness)
    best = sorted(scores, key=lambda flag: (-scores[flag], flag))
    return [flag for flag in best[:3] if scores[flag] >= 0.6]
