"""What holds for the repository as a whole: pins, metadata, pages, and what must not be in any file."""

from __future__ import annotations

import ast
import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from documented_commands import FENCE, DocumentedCommand, documented_commands, marked_blocks, pages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

from openrlhf.config import COMMANDS, parse

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
ORDER = (
    ("cli",),
    ("serve",),
    ("tools",),
    ("trainer",),
    ("workers",),
    ("engines",),
    ("rollout",),
    ("models", "datasets", "cluster"),
    ("algorithms", "batching"),
    ("config", "utils"),
)
"""Packages import only what stands below them, so that none imports one that imports it. docs/architecture.md."""
LEVELS = {package: -level for level, packages in enumerate(ORDER) for package in packages}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def lock_pins(name: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines()]
    pins = [line.split("==") for line in lines if line]
    return {canonicalize_name(package): version for package, version in pins}


@pytest.mark.parametrize("name", ["requirements.txt", "requirements/cpu.txt", "requirements/dev.txt"])
def test_the_lock_satisfies_what_is_required(name: str) -> None:
    pins = lock_pins("cpu.lock")
    for line in (ROOT / name).read_text().splitlines():
        text = line.split("#")[0].strip()
        if text:
            requirement = Requirement(text)
            version = pins.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in requirements/cpu.lock"
            assert requirement.specifier.contains(version), f"{text} against the pinned {version}"


def test_locks_do_not_disagree() -> None:
    assert not lock_pins("cpu.lock").keys() & lock_pins("smollm2.lock").keys()


def test_entry_points_lead_somewhere() -> None:
    (script,) = entry_points(group="console_scripts", name="openrlhf")
    (plugin,) = entry_points(group="vllm.general_plugins", name="openrlhf_weight_sync")
    assert callable(script.load())
    assert callable(plugin.load())


def test_every_module_gets_installed() -> None:
    found = set(find_packages(str(ROOT), include=["openrlhf", "openrlhf.*"]))
    folders = {path.parent.relative_to(ROOT) for path in tracked_files() if path.suffix == ".py"}
    modules = {".".join(folder.parts) for folder in folders if folder.parts[:1] == ("openrlhf",)}
    assert "openrlhf.cli" in modules and modules <= found


def test_every_declared_command_exists() -> None:
    modules = {path.stem for path in (ROOT / "openrlhf/cli").glob("*.py")}
    assert modules - {"__init__", "common", "hooks", "main"} == COMMANDS.keys()


@pytest.mark.parametrize("command", documented_commands(), ids=str)
def test_documented_command_lines_name_flags_that_exist(command: DocumentedCommand) -> None:
    assert command.command in COMMANDS
    unknown = ("is no flag of this command", "belongs to no flag")
    violations = parse(command.command, command.arguments).violations
    # Pages show parts of command lines, with files of the reader: only a wrong name is a mistake there.
    wrong = [violation for violation in violations if violation.problem in unknown]
    assert not wrong, wrong


def test_a_flag_that_does_not_exist_is_told_in_these_words() -> None:
    assert parse("train_sft", ["--nope", "1"]).violations[0].problem == "is no flag of this command"


def test_the_readmes_main_examples_are_complete() -> None:
    blocks = marked_blocks(ROOT / "README.md")
    assert {"train_sft", "train_rm", "train_dpo", "train_ppo_ray", "serve_rm"} <= blocks.keys()
    for command, arguments in blocks.values():
        violations = parse(command, arguments).violations
        assert not [violation for violation in violations if not violation.problem.startswith("there is no f")]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target, place in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not place or place in anchors(path), f"{page.name} links to {target}#{place}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_imports_point_down() -> None:
    upward = []
    for path in (ROOT / "openrlhf").glob("*/**/*.py"):
        package = path.relative_to(ROOT / "openrlhf").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                other = parts[1] if parts[0] == "openrlhf" and len(parts) > 1 else package
                if other not in (package, "platform") and LEVELS[other] >= LEVELS[package]:
                    upward.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {name}")
    # Only public names, for the imports in users' files.
    facades = ("openrlhf/utils/agent.py", "openrlhf/utils/__init__.py")
    upward = [line for line in upward if not line.startswith(facades)]
    assert not upward, upward
    line = " → ".join(", ".join(packages) for packages in ORDER)
    assert line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them all by their names alone."""
    names = [path.name for path in tracked_files() if path.match("tests/**/test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_python_files_stay_readable() -> None:
    long = []
    for path in tracked_files():
        if path.suffix == ".py" and path.is_relative_to(ROOT / "openrlhf"):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") > 600:
                long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > 80:
                        long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, long
