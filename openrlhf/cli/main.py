"""The console script: ``openrlhf COMMAND ...`` is ``python -m openrlhf.cli.COMMAND ...``."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from openrlhf.config import COMMANDS
from openrlhf.config.commands import nearest_command
from openrlhf.utils.former_names import INSTEAD, explain
from openrlhf.utils.process import leave


def usage() -> str:
    """What ``openrlhf --help`` prints."""
    lines = [f"  {name:<16} {COMMANDS[name].summary}" for name in COMMANDS]
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
        The command's exit status; 2 for an unknown command; 141 when what reads the output has ended (``| head``).
    """
    try:
        status = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_has_ended():
            raise  # a pipe of the command's own
        # Python flushes again as it ends, which would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _reader_has_ended() -> bool:
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in watch.poll(0))


def run(words: Sequence[str]) -> int:
    """Run the command that ``words`` begin with; returns its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    command, rest = words[0], list(words[1:])
    if command == "config":
        from openrlhf.config.explain import main as config_main

        return config_main(rest)
    if command == "hooks":
        from openrlhf.cli.hooks import main as hooks_main

        return hooks_main(rest)
    if command not in COMMANDS:
        former = f"openrlhf.cli.{command.replace('-', '_')}"
        if former in INSTEAD:
            print(f"openrlhf: {explain(former)}", file=sys.stderr)
            return 2
        near = nearest_command(command, "config", "hooks")
        hint = f"; did you mean {near}?" if near else ""
        print(f"openrlhf: there is no command {command!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"openrlhf.cli.{command}")
    return int(module.main(rest))


def console() -> NoReturn:
    """The console script."""
    leave(main())


if __name__ == "__main__":
    console()
