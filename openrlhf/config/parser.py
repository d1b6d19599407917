"""From what was written to a checked configuration: defaults < YAML < command line, in that order."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flag import flag_specs
from openrlhf.config.help import format_help
from openrlhf.config.normalize import normalize
from openrlhf.config.problems import ConfigError, Violation, format_violations
from openrlhf.config.rules import validate
from openrlhf.config.sources import CONFIG, Reader, flatten

DEFAULT = "default"


@dataclass(frozen=True)
class Parsed:
    """A configuration and how it came about.

    Attributes:
        command: name of the command, such as train_ppo_ray.
        config: the configuration after the automatic changes, an instance of the command's config class.
        origins: for every flag "default", "FILE:LINE", "command line", or "automatic" with the reason.
        notes: automatic changes and remarks, for the user to read.
        violations: all that is wrong; empty if the configuration can be used.
    """

    command: str
    config: Any
    origins: dict[str, str]
    notes: list[str]
    violations: list[Violation]


def parse_cli(command: str, argv: Sequence[str] | None = None) -> Any:
    """Parse, complete and check a command line. Prints notes to stderr, where several ranks run on the first.

    Args:
        command: one of `COMMANDS`.
        argv: the arguments after the command's name; None = those of this process.

    Returns:
        An instance of the command's config class.

    Raises:
        SystemExit: 0 after ``--help``; 2 after printing everything that is wrong.
    """
    reader = Reader(command)
    reader.read_command_line(sys.argv[1:] if argv is None else argv)
    if reader.help:
        print(format_help(command))
        raise SystemExit(0)
    parsed = _finish(reader)
    if os.environ.get("RANK", "0") == "0":
        for note in parsed.notes:
            print(f"{command}: note: {note}", file=sys.stderr)
        if parsed.violations:
            print(format_violations(command, parsed.violations), file=sys.stderr)
    if parsed.violations:
        raise SystemExit(2)
    return parsed.config


def parse(command: str, argv: Sequence[str]) -> Parsed:
    """As `parse_cli`, but without printing or exiting."""
    reader = Reader(command)
    reader.read_command_line(argv)
    return _finish(reader)


def build(command: str, **values: Any) -> Any:
    """A completed and checked configuration from Python values, by canonical names.

    Raises:
        ConfigError: with everything that is wrong.
    """
    return from_mapping(command, values)


def from_mapping(command: str, values: Mapping[str, Any], origin: str = "given", skip_defaults: bool = False) -> Any:
    """A completed and checked configuration from a (possibly nested) mapping of flags to values.

    Args:
        command: name of the command.
        values: by canonical or dotted names.
        origin: where the values are from, for messages.
        skip_defaults: values equal to their default count as not given.

    Raises:
        ConfigError: with everything that is wrong.
    """
    reader = Reader(command)
    for key, value in flatten(values):
        is_default = key in reader.specs and value == _plain(reader.specs[key].default)
        if not (skip_defaults and is_default):
            reader.assign(key, value, origin)
    parsed = _finish(reader)
    if parsed.violations:
        raise ConfigError(command, parsed.violations)
    return parsed.config


def from_hydra(cfg: Any, command: str = "train_ppo_ray") -> Any:
    """The configuration that a Hydra (OmegaConf) config means, with flat or nested dotted names.

    Raises:
        ConfigError: with everything that is wrong.
    """
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(values, dict):
        raise TypeError(f"expected a mapping of flags to values, got {type(values).__name__}")
    # A structured config brings every flag along; those at their default were not asked for.
    structured = set(flag_specs(COMMANDS[command].config)) <= set(values)
    return from_mapping(command, {str(key): value for key, value in values.items()}, "hydra", structured)


def register_configs() -> None:
    """Put every command's config into Hydra's ConfigStore, under the command's name."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, command in COMMANDS.items():
        store.store(name=name, node=command.config)


def world_size_from_environment() -> int:
    """Ranks of this job as torchrun and the deepspeed launcher announce them; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _finish(reader: Reader) -> Parsed:
    origins = dict.fromkeys(reader.specs, DEFAULT)
    values: dict[str, Any] = {}
    for assignment in reader.assignments:
        values[assignment.flag] = assignment.value
        origins[assignment.flag] = assignment.origin
    explicit = frozenset(values)
    config = reader.config_class(**values | _critic_values_untouched(reader, values))
    config, changes = normalize(reader.command, config, explicit)
    for change in changes:
        if change.flag is not None:
            origins[change.flag] = f"automatic: {change.reason}" if change.reason else DEFAULT
    notes = [*reader.notes, *(change.note for change in changes if change.note)]
    # Without a file that was asked for, everything else may be a mere consequence.
    violations = [violation for violation in reader.violations if violation.flag == CONFIG]
    if not violations:
        # A flag that couldn't be read still has its default: what follows from that is no news.
        reported = {violation.flag for violation in reader.violations}
        found = validate(config, explicit, world_size_from_environment())
        violations = [*reader.violations, *(violation for violation in found if violation.flag not in reported)]
    return Parsed(reader.command, config, origins, notes, violations)


def _critic_values_untouched(reader: Reader, values: Mapping[str, Any]) -> dict[str, Any]:
    """``--actor.max_norm`` speaks of the actor only, ``--max_norm`` of both: what is left for the critic."""
    left = {a.flag: reader.specs[a.flag].default for a in reader.assignments if a.actor_only}
    for assignment in reader.assignments:
        if not assignment.actor_only and assignment.flag in left:
            left[assignment.flag] = assignment.value
    return {f"critic_{flag}": value for flag, value in left.items() if f"critic_{flag}" not in values}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
