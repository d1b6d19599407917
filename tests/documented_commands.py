"""Finds the command lines that README.md and docs/ show."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"<!-- run: (?P<name>\w+) -->\n```bash\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"openrlhf\.cli\.(\w+)")


@dataclass(frozen=True)
class DocumentedCommand:
    """One command line of a page: where it stands, the command, and its arguments."""

    page: str
    line: int
    command: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.command}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_commands() -> list[DocumentedCommand]:
    """Every command line of a shell block that names a command and has flags; `...` stands for left-out parts."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            if block["language"] not in ("", "bash", "sh"):
                continue
            line = text[: block.start()].count("\n") + 2
            for logical, offset in _logical_lines(block["body"]):
                parsed = parse_line(logical)
                if parsed is not None:
                    found.append(DocumentedCommand(str(page.relative_to(ROOT)), line + offset, *parsed))
    return found


def marked_blocks(page: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The blocks after `<!-- run: NAME -->`, as (command, arguments) by name."""
    blocks = {}
    for block in MARKED.finditer(page.read_text(encoding="utf-8")):
        lines = [parse_line(logical) for logical, _ in _logical_lines(block["body"])]
        assert len(lines) == 1 and lines[0] is not None, f"{block['name']}: not one command line"
        blocks[block["name"]] = lines[0]
    return blocks


def parse_line(line: str) -> tuple[str, tuple[str, ...]] | None:
    """(command, arguments) of a shell line that runs a command of openrlhf with flags, else None."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return None
    while words and re.fullmatch(r"[A-Za-z_]+=\S*", words[0]):
        words = words[1:]
    for at, word in enumerate(words):
        module = MODULE.fullmatch(word)
        if module:
            command, rest = module[1], words[at + 1 :]
            break
        if word == "openrlhf" and at == 0 and len(words) > 1:
            command, rest = words[1], words[2:]
            break
    else:
        return None
    if command == "main":
        command, rest = (rest[0], rest[1:]) if rest else ("", [])
    if command == "hooks" and rest[:1] == ["check"]:
        command, rest = "train_ppo_ray", rest[1:]
    if command == "config" and len(rest) > 1 and rest[0] in ("explain", "show"):
        command, rest = rest[1], rest[2:]
        if "--num_rows" in rest:  # a flag of explain, not of the command
            at = rest.index("--num_rows")
            rest = rest[:at] + rest[at + 2 :]
    if command in ("convert", "reward") and rest and not rest[0].startswith("-"):
        rest = ["--task", *rest]
    rest = [word for word in rest if word not in ("&", "...")]
    if not command.isidentifier() or not any(word.startswith("--") for word in rest):
        return None
    return None if "--help" in rest or "..." in line else (command, tuple(rest))


def _logical_lines(body: str) -> list[tuple[str, int]]:
    """Lines joined at their closing backslashes, with the number of the first."""
    logical: list[tuple[str, int]] = []
    pending, first = "", 0
    for number, line in enumerate(body.splitlines()):
        if not pending:
            first = number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1] + " "
            continue
        logical.append((pending + line, first))
        pending = ""
    return logical
