"""The text of ``--help``: flags by concern, then a command line that works."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flag import FlagSpec, flag_specs
from openrlhf.config.values import show_value, type_name

WIDTH = 100
GROUP_ORDER = (
    "Model",
    "Data",
    "Rewards",
    "Algorithm",
    "Sampling",
    "Rollouts",
    "Hooks",
    "Reward model loss",
    "DPO loss",
    "KTO loss",
    "Batches and duration",
    "Optimizer",
    "Actor and critic",
    "Placement",
    "Rollout engines",
    "DeepSpeed and parallelism",
    "Evaluation",
    "Checkpoints",
    "Logging",
    "Server",
    "Merging",
    "Conversion",
    "Batch inference",
    "Reward test",
)
COLUMN = 34


def specs_by_group(command: str) -> Mapping[str, list[FlagSpec]]:
    """The command's flags under the titles of their groups."""
    groups: dict[str, list[FlagSpec]] = {title: [] for title in GROUP_ORDER}
    for spec in flag_specs(COMMANDS[command].config).values():
        groups[spec.group].append(spec)
    return {title: specs for title, specs in groups.items() if specs}


def describe_default(spec: FlagSpec) -> str:
    """What a flag's value is when nobody gives it; empty where the help says it or it is simply off."""
    if spec.kind is bool:
        return "on" if spec.default else ""
    return "" if spec.default is None else show_value(spec.default)


def describe(spec: FlagSpec) -> str:
    """What a flag does, and what it may be."""
    if spec.info.no_effect:
        return f"accepted without effect: {spec.info.no_effect}"
    return spec.info.help + (f" ({', '.join(spec.info.choices)})" if spec.info.choices else "")


def format_help(command: str) -> str:
    """The whole help text of a command."""
    lines = [
        COMMANDS[command].summary,
        "",
        f"usage: openrlhf {command} [--config run.yaml] [--flag value ...] [key=value ...]",
        "",
        *textwrap.wrap(
            "Later values win over earlier ones, and all of them over the YAML file. Names may be written "
            "with underscores, dashes or dots, as a unique beginning, or by their dotted names of OpenRLHF "
            "0.10-0.11. "
            f"'openrlhf config explain {command} ...' shows what a command line comes to.",
            WIDTH,
        ),
    ]
    for title, specs in specs_by_group(command).items():
        lines += ["", f"{title}:"]
        for spec in specs:
            lines += _format_flag(spec)
    return "\n".join([*lines, "", "Example:", f"  openrlhf {command} \\\n    {COMMANDS[command].example}"])


def _format_flag(spec: FlagSpec) -> list[str]:
    value = "" if spec.kind is bool else " " + type_name(spec)
    head = f"  --{spec.name}{value}"
    text, default = describe(spec), describe_default(spec)
    if default and not spec.info.no_effect:
        text += f" (default {default})"
    body = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    if len(head) + 2 > COLUMN:
        return [head, *(" " * COLUMN + line for line in body)]
    return [head.ljust(COLUMN) + body[0], *(" " * COLUMN + line for line in body[1:])]
