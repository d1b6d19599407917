"""Where written values come from: the command line's tokens, YAML files and Hydra-style overrides.

Each source is turned into a list of `Assignment`s, which name a flag, its value and its origin. Problems are
collected, not raised, so that all of them can be reported together.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.config import foreign
from openrlhf.config.flag import FlagSpec, flag_specs
from openrlhf.config.names import Target, UnknownName, name_table, resolve, underscored
from openrlhf.config.problems import Violation
from openrlhf.config.values import FALSE_WORDS, TRUE_WORDS, convert

COMMAND_LINE = "command line"
COMMAND_KEY = "command"
_OVERRIDE = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[A-Za-z_][\w.\-]*)=(?P<value>.*)", re.DOTALL)
_LIST_VALUE = re.compile(r"\s*\[.*\]\s*", re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """A value that someone wrote for a flag."""

    flag: str
    value: Any
    origin: str
    actor_only: bool = False


@dataclass
class Written:
    """All that was written, in the order in which it counts (later wins), and what was wrong with it."""

    assignments: list[Assignment]
    violations: list[Violation]
    notes: list[str]
    help: bool = False


def read_command_line(config_class: type, command: str, argv: Sequence[str]) -> Written:
    """Read flags, ``--config FILE`` and ``key=value`` overrides; files count less than the rest."""
    written = Written([], [], [])
    tokens = deque(argv)
    while tokens:
        token = tokens.popleft()
        if token in ("-h", "--help"):
            written.help = True
        elif token == "--config" or token.startswith("--config="):
            if "=" not in token and _value_ahead(tokens) is None:
                written.violations.append(Violation("config", "needs a YAML file", "write --config run.yaml"))
            else:
                path = token.partition("=")[2] if "=" in token else tokens.popleft()
                _read_yaml_into(config_class, command, path, written)
        elif token.startswith("--") and len(token) > 2:
            _read_flag(config_class, token, tokens, written)
        elif match := _OVERRIDE.fullmatch(token):
            _read_override(config_class, token, match, written)
        else:
            written.violations.append(
                Violation(
                    repr(token),
                    "belongs to no flag",
                    "flags begin with --, overrides look like key=value, and text with blanks needs quotes",
                )
            )
    written.assignments.sort(key=lambda assignment: assignment.origin == COMMAND_LINE)
    return written


def _value_ahead(tokens: deque[str]) -> str | None:
    """The next token if it can be a flag's value: anything that doesn't begin with two dashes."""
    return tokens[0] if tokens and not tokens[0].startswith("--") else None


def _read_flag(config_class: type, token: str, tokens: deque[str], written: Written) -> None:
    name, has_value, text = token[2:].partition("=")
    try:
        target = resolve(config_class, name)
    except UnknownName as unknown:
        values = [text] if has_value else []
        while (following := _value_ahead(tokens)) is not None and not _OVERRIDE.fullmatch(following):
            values.append(tokens.popleft())
        written.violations.append(_unknown(config_class, "--" + name, unknown, " ".join(values) or None, ""))
        return
    spec = flag_specs(config_class)[target.flag]
    raw: Any
    if has_value:
        raw = text
    elif target.negated or target.retired:
        raw = True
    elif spec.kind is bool:
        following = _value_ahead(tokens)
        is_word = following is not None and following.lower() in TRUE_WORDS + FALSE_WORDS
        raw = tokens.popleft() if is_word else True
    else:
        raw = _take_values(config_class, spec, tokens)
        if not raw and spec.count != 0:
            written.violations.append(Violation(target.flag, "needs a value", f"write {token} VALUE"))
            return
    _assign(config_class, target, raw, COMMAND_LINE, written)


def _take_values(config_class: type, spec: FlagSpec, tokens: deque[str]) -> list[str]:
    values: list[str] = []
    while (spec.count == 0 or len(values) < spec.count) and (following := _value_ahead(tokens)) is not None:
        if spec.count != 1 and _is_override(config_class, following):
            break
        if spec.info.min_values and len(values) >= spec.info.min_values and not _is_number(following):
            break
        values.append(tokens.popleft())
        if spec.count > 1 and _LIST_VALUE.fullmatch(values[0]):
            break
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_override(config_class: type, token: str) -> bool:
    match = _OVERRIDE.fullmatch(token)
    return match is not None and underscored(match["key"]) in name_table(config_class)


def _read_override(config_class: type, token: str, match: re.Match[str], written: Written) -> None:
    if match["mark"] == "~":
        problem = "a flag can't be deleted"
        written.violations.append(Violation(token, problem, f"write {match['key']}=VALUE, or leave it out"))
        return
    if target := _key_target(config_class, match["key"], match["value"], "", written):
        raw = parse_override_value(token, match["value"], flag_specs(config_class)[target.flag])
        _assign(config_class, target, raw, COMMAND_LINE, written)


def parse_override_value(token: str, text: str, spec: FlagSpec) -> Any:
    """The value of ``key=value`` by Hydra's grammar; plain text where the grammar has no use for it.

    Hydra reads ``a,b`` as a sweep and stops at a second ``=``; in our flags both are parts of texts.
    """
    if spec.kind is str and spec.count == 1 and not (text[:1] in "'\"" or text in ("null", "")):
        return text
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        override = OverridesParser.create().parse_override(token)
    except OverrideParseException:
        return text
    return text if override.is_sweep_override() else override.value()


def read_yaml(path: Path) -> Iterator[tuple[str, Any, int | None]]:
    """The leaves of a YAML file: dotted key, value (OmegaConf's ``${...}`` resolved), line number.

    Keys that YAML merged in from elsewhere (``<<``) have no line of their own.

    Raises:
        ValueError: if it isn't a mapping, or no YAML.
        OSError: if it can't be read.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = path.read_text(encoding="utf-8")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ValueError("must be a mapping of flags to values")
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from error
    lines = dict(_yaml_lines(root, ""))
    for key, value in flatten(values):
        yield key, value, lines.get(key)


def _yaml_lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        yield key, key_node.start_mark.line + 1
        if value_node.id == "mapping":
            yield from _yaml_lines(value_node, key + ".")


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_yaml_into(config_class: type, command: str, path: str, written: Written) -> None:
    def wrong(problem: str, fix: str) -> None:
        written.violations.append(Violation("config", problem, fix, alone=True))

    try:
        for key, value, line in read_yaml(Path(path).expanduser()):
            origin = path if line is None else f"{path}:{line}"
            if key == COMMAND_KEY:
                if value != command:
                    wrong(f"is for {value}, not for {command} ({origin})", f"run openrlhf {value}")
            else:
                assign_key(config_class, key, value, origin, written)
    except OSError as error:
        wrong(f"{path} can't be read: {error.strerror}", "check the path")
    except ValueError as error:
        wrong(f"{path}: {error}", "write one 'flag: value' a line")


def assign_key(config_class: type, key: str, value: Any, origin: str, written: Written) -> None:
    """Assign a value to a dotted or underscore key of a file."""
    if target := _key_target(config_class, key, None if value is None else str(value), f" ({origin})", written):
        _assign(config_class, target, value, origin, written)


def _key_target(config_class: type, key: str, value: str | None, where: str, written: Written) -> Target | None:
    """What the key of an assignment means; what means nothing is noted, and gives None."""
    try:
        return resolve(config_class, key, prefixes=False)
    except UnknownName as unknown:
        written.violations.append(_unknown(config_class, key + "=", unknown, value, where))
        return None


def _assign(config_class: type, target: Target, raw: Any, origin: str, written: Written) -> None:
    spec = flag_specs(config_class)[target.flag]
    try:
        if target.negated:
            value: Any = not convert(spec, raw)
        elif target.retired is not None:
            if str(raw).lower() in FALSE_WORDS:
                return
            value = target.retired.value
            written.notes.append(target.retired.note)
        else:
            value = convert(spec, raw)
    except ValueError as error:
        where = "" if origin == COMMAND_LINE else f" ({origin})"
        meant = foreign.value_here(target.flag, " ".join(map(str, raw)) if isinstance(raw, list) else str(raw))
        fix = spec.info.help if meant is None else f"did you mean {meant}?"
        written.violations.append(Violation(target.flag, f"{error}{where}", fix))
        return
    written.assignments.append(Assignment(target.flag, value, origin, target.actor_only))


def _unknown(config_class: type, name: str, unknown: UnknownName, value: str | None, where: str) -> Violation:
    translated = foreign.translate(unknown.name, value, flag_specs(config_class))
    if translated is not None and (translated.fits or not unknown.ambiguous):
        return Violation(name, f"is a name of {translated.system}{where}", f"here it is {translated.advice}")
    if unknown.ambiguous:
        problem = f"could be any of {', '.join('--' + flag for flag in unknown.close)}{where}"
        return Violation(name, problem, "write more of the name")
    fix = "did you mean " + " or ".join("--" + flag for flag in unknown.close) + "?" if unknown.close else ""
    return Violation(name, f"is no flag of this command{where}", fix or "--help lists the flags")
