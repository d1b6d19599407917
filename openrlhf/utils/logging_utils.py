"""The logger that users' files import: ``from openrlhf.utils.logging_utils import init_logger``."""

from openrlhf.utils.former_names import explain
from openrlhf.utils.logging import get_logger as init_logger

__all__ = ["init_logger"]

# As in a package, an import of a name that isn't here is asked of the finders, which say what to use instead.
__path__: list[str] = []


def __getattr__(name: str) -> None:
    raise AttributeError(explain(f"{__name__}.{name}"))
