"""Which failures end a command with a message, and which with a traceback."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "openrlhf"
HANDLED = {
    "ConfigError": "the parser prints every mistake and ends with 2",
    "FlagValueError": "becomes a mistake in the flags, a DataError or a RewardError",
    "ImageError": "becomes a lost prompt, a DataError or an AgentError",
    "StalenessError": "a mistake of the loop, not of the user",
}
"""Errors that no command meets as they are, and why."""


def error_classes() -> dict[str, set[str]]:
    """Every public class of the package that is named Error, with the names of its bases."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_"):
                found[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return found


def test_every_error_of_the_package_is_explained_by_the_commands() -> None:
    classes = error_classes()
    explained = {"ExplainedError"}
    while more := {name for name, bases in classes.items() if bases & explained} - explained:
        explained |= more
    assert {"DataError", "VisionError", "AgentError"} <= explained
    assert classes.keys() - explained == HANDLED.keys()
