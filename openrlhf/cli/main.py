"""The console script: ``openrlhf COMMAND ...`` is ``python -m openrlhf.cli.COMMAND ...``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches

import openrlhf.cli
from openrlhf.config import COMMANDS


def command_names() -> list[str]:
    """The commands there are: the modules of openrlhf.cli but this one, in the order of the declarations."""
    modules = {module.name for module in pkgutil.iter_modules(openrlhf.cli.__path__)} - {"main"}
    return [name for name in COMMANDS if name in modules]


def usage() -> str:
    """What ``openrlhf --help`` prints."""
    lines = [f"  {name:<16} {COMMANDS[name].summary}" for name in command_names()]
    return "\n".join(
        [
            "usage: openrlhf COMMAND [flags]",
            "",
            *lines,
            f"  {'config':<16} Explain, show or compare configurations without running anything.",
            f"  {'hooks':<16} Try the hooks of a train_ppo_ray run on its first prompts: hooks check [flags].",
            "",
            "openrlhf COMMAND --help lists a command's flags; openrlhf config explain COMMAND [flags] says what",
            "they come to: every value, where it is from, batches, steps and GPUs.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The command's exit status; 2 for an unknown command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command, rest = words[0], words[1:]
    if command == "config":
        from openrlhf.config.explain import main as config_main

        return config_main(rest)
    if command == "hooks":
        from openrlhf.cli.hooks import main as hooks_main

        return hooks_main(rest)
    names = command_names()
    if command not in names:
        near = get_close_matches(command.replace("-", "_"), [*names, "config", "hooks"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"openrlhf: there is no command {command!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"openrlhf.cli.{command}")
    return int(module.main(rest))


if __name__ == "__main__":
    sys.exit(main())
