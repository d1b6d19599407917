"""Folders and files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

# Files of an earlier save that a new one may not write again (other shard counts, other formats).
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_*")


@contextlib.contextmanager
def temporary_folder(target: str | Path) -> Iterator[Path]:
    """An empty folder beside ``target`` (same file system), removed afterwards if it is still there."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def publish_folder(source: str | Path, target: str | Path) -> None:
    """Move a finished folder to its place.

    A missing or empty target is replaced by one rename. A target with other content (``--save_path ./ckpt`` holds
    the checkpoints by default) keeps what is not a model file; the new files replace the old ones one by one,
    which takes only renames, since they are already on this file system.
    """
    source, target = Path(source), Path(target)
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    if not target.exists():
        os.replace(source, target)
        return
    if not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; it should be a folder to save into")
    new = sorted(source.iterdir(), key=lambda p: (p.name == "config.json", p.name))
    for path in new:
        destination = target / path.name
        if path.is_dir() and destination.is_dir():
            shutil.rmtree(destination)
        os.replace(path, destination)
    names = {path.name for path in new}
    for pattern in _MODEL_FILES:
        for stale in target.glob(pattern):
            if stale.is_file() and stale.name not in names:
                stale.unlink()


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file to write, text in UTF-8: readers see the old content or all of the new, never a part."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(scratch, mode, encoding="utf-8" if mode == "w" else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_atomic(path: str | Path, text: str) -> None:
    """Write a small text file; see :func:`atomic_file`."""
    with atomic_file(path) as file:
        file.write(text)


def folder_bytes(path: str | Path) -> int:
    """Total size of the files below a folder."""
    return sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file())
