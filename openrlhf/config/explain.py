"""``openrlhf config explain|show|diff``: what a command line comes to, and where each value is from."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from openrlhf.config.commands import COMMANDS, PPOConfig, TrainerOptions, nearest_command
from openrlhf.config.derive import Derived, count_rows, data_copies, derive, frozen_rollouts
from openrlhf.config.flag import flag_specs
from openrlhf.config.help import specs_by_group
from openrlhf.config.parser import DEFAULT, Parsed, parse, world_size_from_environment
from openrlhf.config.problems import format_violations
from openrlhf.config.sources import COMMAND_KEY, Reader, read_yaml
from openrlhf.config.values import show_value

MASK = "***"
HELP = ("-h", "--help")
ACTIONS = ("explain", "show", "diff")
USAGE = """usage: openrlhf config explain COMMAND [flags]   each value, where it is from, and what follows
       openrlhf config show COMMAND [flags]      the complete configuration as YAML
       openrlhf config diff A.yaml B.yaml        the flags in which two configurations differ

explain also takes --num_rows N, the number of training rows, where it can't count them itself."""


def main(argv: Sequence[str]) -> int:
    """Run ``openrlhf config ARGV``; returns the exit status: 2 for mistakes, 1 if two files differ."""
    action, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if action in HELP or (rest and rest[0] in HELP):
        print(USAGE)
        return 0
    if action == "diff" and len(rest) >= 2:
        return _diff(*rest)
    if action not in ACTIONS:
        return _misused(f"{action!r} is none of {', '.join(ACTIONS)}" if action else "what to do is missing")
    if action == "diff" or not rest:
        return _misused("two YAML files are needed" if action == "diff" else "a command is needed")
    if rest[0] not in COMMANDS:
        return _misused(f"there is no command {rest[0]!r}", rest[0])
    command, flags = rest[0], rest[1:]
    num_rows = None
    if action == "explain":
        own = argparse.ArgumentParser("openrlhf config explain", "%(prog)s COMMAND [flags]", add_help=False)
        own.add_argument("--num_rows", "--num-rows", type=int)
        given, flags = own.parse_known_args(flags)
        num_rows = given.num_rows
    parsed = parse(command, flags)
    print(format_explanation(parsed, num_rows) if action == "explain" else format_yaml(parsed.command, parsed.config))
    if parsed.violations:
        print(format_violations(command, parsed.violations), file=sys.stderr)
        return 2
    return 0


def _misused(problem: str, command: str = "") -> int:
    near = nearest_command(command) if command else None
    hint = f"; did you mean {near}?" if near else ""
    print(f"config: {problem}{hint}\n\n{USAGE}\n\nCOMMAND is one of {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def format_explanation(parsed: Parsed, num_rows: int | None) -> str:
    """Every value with its origin by concern, then notes, then the arithmetic (if the values are valid)."""
    lines = [f"openrlhf {parsed.command}"]
    for title, specs in specs_by_group(parsed.command).items():
        lines += ["", title]
        for spec in specs:
            value = shown(parsed.config, spec.name)
            origin = parsed.origins[spec.name]
            lines.append(f"  {spec.name:<34} {value:<24} {'' if origin == DEFAULT else origin}".rstrip())
    if parsed.notes:
        lines += ["", "Notes", *(f"  {note}" for note in parsed.notes)]
    if isinstance(parsed.config, TrainerOptions) and not parsed.violations:
        lines += ["", "What follows", *(f"  {line}" for line in describe_run(parsed.config, num_rows))]
    return "\n".join(lines)


def describe_run(cfg: TrainerOptions, num_rows: int | None) -> list[str]:
    """The arithmetic of a run in sentences; rows that aren't given are counted where that is cheap."""
    rows = num_rows if num_rows is not None else count_rows(cfg)
    derived = derive(cfg, rows, world_size_from_environment())
    roles = ", ".join(f"{role} {count}" for role, count in derived.gpus.items())
    gpus = f"GPUs (or ranks, on CPU): {derived.total_gpus} in all; {roles}"
    return [*_describe_batches(cfg, derived), *_describe_steps(cfg, derived), gpus]


def _describe_batches(cfg: TrainerOptions, derived: Derived) -> list[str]:
    lines = [f"data-parallel ranks: {derived.data_parallel_size}"]
    if isinstance(cfg, PPOConfig):
        lines.append(
            f"samples of a rollout: {cfg.rollout_batch_size} prompts x {cfg.n_samples_per_prompt} responses "
            f"= {derived.samples_per_rollout}"
        )
        lines.append(
            f"optimizer steps on a rollout: {derived.samples_per_rollout} / {_step_size(cfg)} samples "
            f"x {cfg.max_epochs} epochs = {derived.steps_per_rollout}"
        )
        lines.append(f"tokens: at most {derived.prompt_limit} of a prompt, {cfg.max_len} in all")
    if derived.micro_batches_per_step is not None:
        lines.append(
            f"micro-batches of a rank in an optimizer step: {cfg.train_batch_size} / ("
            f"{cfg.micro_train_batch_size} x {derived.data_parallel_size}) = {derived.micro_batches_per_step}"
        )
    elif isinstance(cfg, PPOConfig):
        lines.append(f"micro-batches: filled up to {cfg.train_max_tokens_per_gpu * data_copies(cfg)} tokens")
    if derived.forward_micro_batches is not None:
        lines.append(f"micro-batches of a rank in a forward pass over a rollout: {derived.forward_micro_batches}")
    return lines


def _step_size(cfg: PPOConfig) -> int:
    """Samples of an optimizer step: whole groups, where a step holds several."""
    batch, n = cfg.train_batch_size, cfg.n_samples_per_prompt
    return batch // n * n or batch


def _describe_steps(cfg: TrainerOptions, derived: Derived) -> list[str]:
    if isinstance(cfg, PPOConfig) and cfg.load_rollouts:
        return [f"rollouts: those in {cfg.load_rollouts}"]
    if derived.num_rows is None:
        return ["total steps: depend on the number of rows; tell it with --num_rows"]
    lines = [f"rows: {derived.num_rows}"]
    if derived.num_rollouts is not None:
        lines.append(f"rollouts: {derived.num_rollouts}")
    if isinstance(cfg, PPOConfig) and cfg.rollout_only:
        return [*lines, "nothing is trained"]
    more = ", fewer if dynamic_filtering runs out of prompts" if getattr(cfg, "dynamic_filtering", False) else ""
    lines.append(f"total optimizer steps: {derived.total_steps}, {derived.warmup_steps} of them warm-up{more}")
    if derived.actor_steps != derived.total_steps and isinstance(cfg, PPOConfig):
        lines.append(
            f"optimizer steps of the actor: {derived.actor_steps}, {derived.actor_warmup_steps} of them warm-up; it is "
            f"frozen in the first {frozen_rollouts(cfg)} rollouts"
        )
    return lines


def format_yaml(command: str, cfg: Any) -> str:
    """The configuration as YAML that ``--config`` reads again, sorted by flag; secrets are masked."""
    import yaml

    values: dict[str, Any] = {COMMAND_KEY: command}
    for field in sorted(fields(cfg), key=lambda field: field.name):
        value = getattr(cfg, field.name)
        if flag_specs(type(cfg))[field.name].info.secret and value:
            continue  # a masked key would be taken for a key when the file is read again
        values[field.name] = list(value) if isinstance(value, tuple) else mask_urls(value)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip()


def shown(cfg: Any, name: str) -> str:
    """A flag's value for people, with secrets masked."""
    value = getattr(cfg, name)
    if flag_specs(type(cfg))[name].info.secret and value:
        return MASK
    return show_value(mask_urls(value))


def mask_urls(value: Any) -> Any:
    """Text without the passwords of URLs such as http://user:password@host."""
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", rf"\1{MASK}@", value) if isinstance(value, str) else value


def _diff(first: str, second: str, *flags: str) -> int:
    """Compare two YAML files, complete with defaults if they name the same command, else as they stand."""
    try:
        written = [{key: value for key, value, _ in read_yaml(Path(path))} for path in (first, second)]
    except (OSError, ValueError) as error:
        print(f"config diff: {error}", file=sys.stderr)
        return 2
    named = {values[COMMAND_KEY] for values in written if COMMAND_KEY in values}
    commands = {*named, *flags}
    if len(commands) != 1 or not commands <= set(COMMANDS):
        print(
            "config diff: the files must be for one command; 'command: train_sft' in a file says which, "
            f"or name it last. Commands: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    command = commands.pop()
    for path in (first, second):
        reader = Reader(command)
        reader.read_command_line(["--config", path])
        if reader.violations:
            print(format_violations(command, reader.violations), file=sys.stderr)
            return 2
    left, right = (parse(command, ["--config", path]) for path in (first, second))
    names = [name for name in flag_specs(COMMANDS[command].config) if _differ(left, right, name)]
    for name in sorted(names):
        print(f"{name}: {shown(left.config, name)} -> {shown(right.config, name)}")
    return 1 if names else 0


def _differ(left: Parsed, right: Parsed, name: str) -> bool:
    """Whether the flag differs; defaults don't, although one of them tells the time."""
    if left.origins[name] == right.origins[name] == DEFAULT:
        return False
    return bool(getattr(left.config, name) != getattr(right.config, name))
