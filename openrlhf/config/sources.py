"""Where written values come from: the command line's tokens, YAML files and Hydra-style overrides.

A `Reader` turns each of them into `Assignment`s, which name a flag, its value and its origin. Problems are collected,
not raised, so that all of them can be reported together.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.config import foreign
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flag import FlagSpec, flag_specs
from openrlhf.config.names import Target, UnknownName, name_table, resolve, underscored
from openrlhf.config.problems import Violation
from openrlhf.config.values import FALSE_WORDS, TRUE_WORDS, convert

COMMAND_LINE = "command line"
COMMAND_KEY = "command"
CONFIG = "config"
_OVERRIDE = re.compile(r"(?P<mark>\+{0,2}|~)(?P<key>[A-Za-z_][\w.\-]*)=(?P<value>.*)", re.DOTALL)
_LIST_VALUE = re.compile(r"\s*\[.*\]\s*", re.DOTALL)


@dataclass(frozen=True)
class Assignment:
    """A value that someone wrote for a flag."""

    flag: str
    value: Any
    origin: str
    actor_only: bool = False


class Reader:
    """Collects what was written for a command.

    Attributes:
        assignments: in the order in which they count: later wins.
        violations: what was wrong.
        notes: remarks for the user.
        help: the help was asked for.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.config_class: type = COMMANDS[command].config
        self.specs = flag_specs(self.config_class)
        self.assignments: list[Assignment] = []
        self.violations: list[Violation] = []
        self.notes: list[str] = []
        self.help = False

    def read_command_line(self, argv: Sequence[str]) -> None:
        """Read flags, ``--config FILE`` and ``key=value`` overrides; files count less than the rest."""
        tokens = deque(argv)
        while tokens:
            token = tokens.popleft()
            if token in ("-h", "--help"):
                self.help = True
            elif token == "--config" or token.startswith("--config="):
                if "=" not in token and _value_ahead(tokens) is None:
                    self._wrong(CONFIG, "needs a YAML file", "write --config run.yaml")
                else:
                    self._read_yaml(token.partition("=")[2] if "=" in token else tokens.popleft())
            elif token.startswith("--") and len(token) > 2:
                self._read_flag(token, tokens)
            elif match := _OVERRIDE.fullmatch(token):
                self._read_override(token, match)
            else:
                fix = "flags begin with --, overrides look like key=value, and text with blanks needs quotes"
                self._wrong(repr(token), "belongs to no flag", fix)
        self.assignments.sort(key=lambda assignment: assignment.origin == COMMAND_LINE)

    def assign(self, key: str, value: Any, origin: str) -> None:
        """Assign a value to a dotted or underscore key of a file."""
        if target := self._key_target(key, None if value is None else str(value), f" ({origin})"):
            self._assign(target, value, origin)

    def _wrong(self, flag: str, problem: str, fix: str) -> None:
        self.violations.append(Violation(flag, problem, fix))

    def _read_flag(self, token: str, tokens: deque[str]) -> None:
        name, has_value, text = token[2:].partition("=")
        try:
            target = resolve(self.config_class, name)
        except UnknownName as unknown:
            values = [text] if has_value else []
            while (following := _value_ahead(tokens)) is not None and not _OVERRIDE.fullmatch(following):
                values.append(tokens.popleft())
            self._unknown("--" + name, unknown, " ".join(values) or None, "")
            return
        spec = self.specs[target.flag]
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
            raw = self._take_values(spec, tokens)
            if not raw and spec.count != 0:
                self._wrong(target.flag, "needs a value", f"write {token} VALUE")
                return
        self._assign(target, raw, COMMAND_LINE)

    def _take_values(self, spec: FlagSpec, tokens: deque[str]) -> list[str]:
        values: list[str] = []
        while (spec.count == 0 or len(values) < spec.count) and (following := _value_ahead(tokens)) is not None:
            if spec.count != 1 and self._is_override(following):
                break
            if spec.info.min_values and len(values) >= spec.info.min_values and not _is_number(following):
                break
            values.append(tokens.popleft())
            if spec.count > 1 and _LIST_VALUE.fullmatch(values[0]):
                break
        return values

    def _is_override(self, token: str) -> bool:
        match = _OVERRIDE.fullmatch(token)
        return match is not None and underscored(match["key"]) in name_table(self.config_class)

    def _read_override(self, token: str, match: re.Match[str]) -> None:
        if match["mark"] == "~":
            self._wrong(token, "a flag can't be deleted", f"write {match['key']}=VALUE, or leave it out")
        elif target := self._key_target(match["key"], match["value"], ""):
            self._assign(target, _override_value(token, match["value"], self.specs[target.flag]), COMMAND_LINE)

    def _read_yaml(self, path: str) -> None:
        try:
            for key, value, line in read_yaml(Path(path).expanduser()):
                origin = path if line is None else f"{path}:{line}"
                if key != COMMAND_KEY:
                    self.assign(key, value, origin)
                elif value != self.command:
                    self._wrong(CONFIG, f"is for {value}, not for {self.command} ({origin})", f"run openrlhf {value}")
        except OSError as error:
            self._wrong(CONFIG, f"{path} can't be read: {error.strerror}", "check the path")
        except ValueError as error:
            self._wrong(CONFIG, f"{path}: {error}", "write one 'flag: value' a line")

    def _key_target(self, key: str, value: str | None, where: str) -> Target | None:
        """What the key of an assignment means; what means nothing is noted, and gives None."""
        try:
            return resolve(self.config_class, key, prefixes=False)
        except UnknownName as unknown:
            self._unknown(key + "=", unknown, value, where)
            return None

    def _assign(self, target: Target, raw: Any, origin: str) -> None:
        spec = self.specs[target.flag]
        try:
            if target.negated:
                value: Any = not convert(spec, raw)
            elif target.retired is not None:
                if str(raw).lower() in FALSE_WORDS:
                    return
                value = target.retired.value
                self.notes.append(target.retired.note)
            else:
                value = convert(spec, raw)
        except ValueError as error:
            where = "" if origin == COMMAND_LINE else f" ({origin})"
            meant = foreign.value_here(target.flag, " ".join(map(str, raw)) if isinstance(raw, list) else str(raw))
            self._wrong(target.flag, f"{error}{where}", spec.info.help if meant is None else f"did you mean {meant}?")
            return
        self.assignments.append(Assignment(target.flag, value, origin, target.actor_only))

    def _unknown(self, name: str, unknown: UnknownName, value: str | None, where: str) -> None:
        close = ["--" + flag for flag in unknown.close]
        translated = foreign.translate(unknown.name, value, self.specs)
        if translated is not None and (translated.fits or not unknown.ambiguous):
            self._wrong(name, f"is a name of {translated.system}{where}", f"here it is {translated.advice}")
        elif unknown.ambiguous:
            self._wrong(name, f"could be any of {', '.join(close)}{where}", "write more of the name")
        else:
            fix = f"did you mean {' or '.join(close)}?" if close else "--help lists the flags"
            self._wrong(name, f"is no flag of this command{where}", fix)


def _value_ahead(tokens: deque[str]) -> str | None:
    """The next token if it can be a flag's value: anything that doesn't begin with two dashes."""
    return tokens[0] if tokens and not tokens[0].startswith("--") else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _override_value(token: str, text: str, spec: FlagSpec) -> Any:
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
