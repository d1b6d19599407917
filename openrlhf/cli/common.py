"""What the commands have in common: reading the command line, and telling of a failure that explains itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.config import parse_cli
from openrlhf.tools.report import Report
from openrlhf.utils.errors import ExplainedError


def train(command: str, module: str, argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then train in this process, a rank of the job.

    Args:
        command: its name.
        module: where its ``train`` is.
        argv: the arguments; None = those of the process.

    Returns:
        The exit status: 0, or 1 for a failure that was explained.
    """
    cfg = parse_cli(command, argv)
    # Nothing heavy is imported before the flags are known to be right, and the columns, where that is quickly seen.
    from openrlhf.datasets.sources import check_small_file

    try:
        check_small_file(cfg)
    except ExplainedError as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return 1
    from openrlhf import platform

    platform.prepare_process()
    from openrlhf.trainer.supervised import run_command

    return run_command(cfg, importlib.import_module(module).train)


def with_task(argv: Sequence[str] | None) -> list[str]:
    """The words of a command line (None: those of the process), the first of which is short for ``--task``."""
    words = list(sys.argv[1:] if argv is None else argv)
    short = bool(words) and not words[0].startswith("-") and "=" not in words[0]
    return ["--task"] * short + words


def tool(command: str, module: str, argv: Sequence[str] | None = None) -> int:
    """Parse and check the flags, then call ``run`` of the module; the exit status is that of :func:`run_tool`."""
    cfg = parse_cli(command, argv)
    from openrlhf import platform

    platform.prepare_process()
    return run_tool(importlib.import_module(module).run, cfg)


def run_tool(run: Callable[[Any], str | Report], cfg: Any) -> int:
    """Run a tool and print what it says, or why it could do nothing.

    Returns:
        The exit status: 0, or 1 for a failure that was explained (nothing is written then) or that a report counts.
    """
    try:
        said = run(cfg)
    except (ExplainedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text, failures = (said, 0) if isinstance(said, str) else said
    if text:
        print(text)
    return 1 if failures else 0
