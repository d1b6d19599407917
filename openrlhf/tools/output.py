"""Folders that the small commands make: complete or not at all, and never over something of another origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openrlhf.tools.errors import ToolError

MARKER = "made_by.json"


def check_output(output: str, command: str, inputs: Mapping[str, str | None]) -> Path:
    """The output folder, if it may be written.

    Args:
        inputs: folders that are read, by flag.

    Raises:
        ToolError: the folder has content of another origin, or is one of the inputs.
    """
    path = Path(output)
    for flag, source in inputs.items():
        if source and Path(source).resolve() == path.resolve():
            raise ToolError(f"--output_path {output} is --{flag}; choose another folder")
    if path.exists() and not path.is_dir():
        raise ToolError(f"--output_path {output} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()) and _maker(path) != command:
        found = ", ".join(sorted(p.name for p in path.iterdir())[:10])
        raise ToolError(
            f"--output_path {output} is not empty and was not made by {command} (it holds: {found}); choose another "
            "folder, or remove it first"
        )
    return path


def mark(folder: Path, command: str, **facts: Any) -> None:
    """Note in a folder how it was made."""
    text = json.dumps({"command": command, **facts}, indent=1)
    (folder / MARKER).write_text(text + "\n", encoding="utf-8")


def _maker(folder: Path) -> str | None:
    file = folder / MARKER
    return json.loads(file.read_text(encoding="utf-8")).get("command") if file.is_file() else None
