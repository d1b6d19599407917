"""The failure that the small commands explain."""

from __future__ import annotations


class ToolError(RuntimeError):
    """A command can't do what it was asked for; the message says why, and what to do."""
