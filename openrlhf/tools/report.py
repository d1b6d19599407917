"""What commands tell that try something of a user's (``reward test``, ``hooks check``)."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """A text for people, and the number of samples or hooks that failed."""

    text: str
    failures: int
