"""How a command-line flag is declared: one dataclass field, with everything known about it in its metadata.

A field's name is the canonical (underscore) spelling of the flag, its annotation is the type and its default
is the default. Command line, YAML, Hydra overrides, ``--help`` and docs/flags.md all derive from it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagInfo:
    """What the annotation and the default of a flag don't say.

    Attributes:
        help: one sentence for ``--help`` and the docs.
        dotted: the dotted spellings of OpenRLHF 0.10.2-0.11.2.
        negated: spellings that switch a flag which is on by default off.
        choices: the values allowed; empty for free values.
        extensible: code of the user can add to the choices, so they are no limit when a value is read.
        value_aliases: old spellings of values, with what they mean now.
        secret: never print the value.
        since: "0.9" for flags of OpenRLHF 0.9.10, "0.11" for those that came with the dotted releases,
            "old" for those that were removed before 0.9.10, "new" for those of this project.
        no_effect: why a value other than the default changes nothing; empty for flags that do something.
        min_values: fewest values of a flag that takes several (None: exactly as many as the type has).
        verbatim: a text in brackets is that text, not a list.
    """

    help: str
    dotted: tuple[str, ...] = ()
    negated: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    extensible: bool = False
    value_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret: bool = False
    since: str = "0.9"
    no_effect: str = ""
    min_values: int | None = None
    verbatim: bool = False


def flag(default: Any, help: str, *dotted: str, **declared: Any) -> Any:
    """Declare a flag; the result is a dataclass field. See `FlagInfo` for the arguments."""
    return _field(default, FlagInfo(help, dotted, **declared))


def redefault(group: type, name: str, default: Any) -> Any:
    """The flag `name` of `group` once more, with another default: how a command differs from its groups."""
    return _field(default, declaration(group, name))


def declaration(group: type, name: str) -> FlagInfo:
    """What the flag `name` of `group` is declared with."""
    for field in dataclasses.fields(group):
        if field.name == name:
            return field.metadata[METADATA_KEY]
    raise AttributeError(f"{group.__name__} has no flag {name}")


def _field(default: Any, info: FlagInfo) -> Any:
    metadata = {METADATA_KEY: info}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """A declared flag as parsers and printers need it.

    Attributes:
        name: the canonical spelling, without dashes.
        kind: bool, int, float or str: the type of one value.
        optional: None is allowed.
        count: how many values: 1, 2 for a pair, or 0 for a list of any length.
        default: the default of the command that was asked about.
        info: the declaration.
        group: title of the concern the flag belongs to.
    """

    name: str
    kind: type
    optional: bool
    count: int
    default: Any
    info: FlagInfo
    group: str


class OptionGroup:
    """Base of the concern groups. `title` heads the group's part of ``--help`` and docs/flags.md."""

    title: ClassVar[str] = ""


def flag_specs(config_class: type) -> dict[str, FlagSpec]:
    """All flags of a config class, by canonical name, in the order of their groups."""
    return _flag_specs(config_class)  # a cached function takes no type[...] in the eyes of mypy


@functools.cache
def _flag_specs(config_class: type) -> dict[str, FlagSpec]:
    hints = typing.get_type_hints(config_class)
    specs = {}
    for field in dataclasses.fields(config_class):
        info = field.metadata[METADATA_KEY]
        kind, optional, count = _describe_type(field.name, hints[field.name])
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        group = _declaring_group(config_class, field.name).title
        specs[field.name] = FlagSpec(field.name, kind, optional, count, default, info, group)
    return specs


def flag_value(config: Any, name: str) -> Any:
    """The value of a flag, None if the command doesn't have it (an attribute of that name is no flag)."""
    return getattr(config, name) if name in flag_specs(type(config)) else None


def _declaring_group(config_class: type, name: str) -> type[OptionGroup]:
    """The most basic class that declares `name`: a command that only changes the default doesn't count."""
    return next(cls for cls in reversed(config_class.__mro__) if name in cls.__dict__.get("__annotations__", {}))


def _describe_type(name: str, annotation: Any) -> tuple[type, bool, int]:
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        if len(members) != 1:
            raise TypeError(f"flag {name}: a flag has one type, not {annotation}")
        annotation = members[0]
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return typing.get_args(annotation)[0], optional, len(typing.get_args(annotation))
    if origin is list:
        return typing.get_args(annotation)[0], optional, 0
    return annotation, optional, 1
