"""What a person sees while a run goes on: one live line a phase, one line a step. Everything else is in files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Console:
    """Prints to stdout (nothing if `quiet`); live lines only on a terminal, so that log files stay readable."""

    def __init__(self, quiet: bool = False) -> None:
        self._rich = RichConsole(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = self._rich.is_terminal and not quiet
        self.seconds: dict[str, float] = {}
        """Seconds by phase since :meth:`new_step`."""

    def new_step(self) -> None:
        self.seconds = {}

    def say(self, text: str) -> None:
        """One line (or paragraph) that stays."""
        self._rich.print(text, markup=False)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a phase while it runs, and add its seconds to :attr:`seconds` under its name.

        Args:
            total: how many parts it has; the function that it gives counts one of them.
        """
        columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
        if total is not None:
            columns[2:2] = [BarColumn(), MofNCompleteColumn()]
        progress = Progress(*columns, console=self._rich, transient=True, disable=not self._live)
        task = progress.add_task(name, total=total)
        started = time.monotonic()
        try:
            with progress:
                yield lambda: progress.advance(task)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def step_line(self, step: int, total: int | None, figures: Mapping[str, float]) -> None:
        """The one line of a step: figures by name, then seconds by phase."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        of = f"/{total}" if total else ""
        self.say(f"step {step}{of}  {shown}  | {sum(self.seconds.values()):.1f} s: {phases}")
