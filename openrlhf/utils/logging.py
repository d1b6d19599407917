"""Loggers: one line format for every process, quiet on all ranks but the first."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ROOT = "openrlhf"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _FirstRankOnly(logging.Filter):
    """Lets warnings through on every rank, the rest on rank 0 only."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING and _rank() > 0:
            record.msg = f"[rank {_rank()}] {record.msg}"
            return True
        return _rank() == 0


def get_logger(name: str) -> logging.Logger:
    """A logger below ``openrlhf``; the level comes from ``OPENRLHF_LOG_LEVEL`` (default INFO)."""
    root = logging.getLogger(_ROOT)
    if not any(isinstance(own, _FirstRankOnly) for handler in root.handlers for own in handler.filters):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        handler.addFilter(_FirstRankOnly())
        root.addHandler(handler)
        root.setLevel(os.environ.get("OPENRLHF_LOG_LEVEL", "INFO").upper())
        root.propagate = False
        # peft imports bitsandbytes wherever it is installed, which then misses a CPU kernel that no training uses.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    return root if name == _ROOT else root.getChild(name.removeprefix(f"{_ROOT}."))


_seen: set[str] = set()


def note_once(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log a message the first time it is given in this process."""
    if message not in _seen:
        _seen.add(message)
        logger.log(level, "%s", message)
