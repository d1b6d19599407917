"""The failure that the small commands explain."""

from __future__ import annotations

from openrlhf.utils.errors import ExplainedError


class ToolError(ExplainedError):
    """A command can't do what it was asked for; the message says why, and what to do."""
