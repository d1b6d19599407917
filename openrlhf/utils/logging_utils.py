"""The logger that users' files import: ``from openrlhf.utils.logging_utils import init_logger``."""

import logging

from openrlhf.utils.former_names import refuse
from openrlhf.utils.logging import get_logger

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """A logger that writes where this package's own do."""
    return get_logger(name)


def __getattr__(name: str) -> None:
    refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
