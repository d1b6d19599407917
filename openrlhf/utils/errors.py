"""The failures that commands explain instead of showing a traceback."""

from __future__ import annotations


class ExplainedError(Exception):
    """The message says what was wrong and what to do: a command prints it and ends with status 1."""

    needs_log = False
    """Set where the end of the process's log says more than the message."""
