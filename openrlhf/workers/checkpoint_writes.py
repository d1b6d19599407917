"""Writes that all ranks hear of when they fail on one: of checkpoints, and of models and files beside them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from openrlhf.config.commands import TrainerOptions
from openrlhf.config.derive import writes_checkpoints
from openrlhf.workers.checkpoint_files import CheckpointError
from openrlhf.workers.distributed import raise_together

_TORCH_WRITER = ("inline_container.cc", "PytorchStreamWriter", "unexpected pos", "iostream error", "Parent directory")
"""What torch.save says when its writer fails: a RuntimeError like any other, and not a word of a full disk."""


def is_write_failure(error: Exception) -> bool:
    """Whether the disk is to blame, or who may write to it: not a weight that can't be written or a mistake."""
    if isinstance(error, SafetensorError):
        return "I/O error" in str(error)
    # errors of collectives and of a GPU without memory have types of their own
    torch_failed = type(error) is RuntimeError and any(words in str(error) for words in _TORCH_WRITER)
    return torch_failed or isinstance(error, OSError)


def write_problem(error: Exception, folder: str | Path) -> str:
    """What a failed write says, and the room that is left: torch's errors don't tell of a full disk. Never raises."""
    told = f"{type(error).__name__}: {error}"
    try:
        free = shutil.disk_usage(_existing(Path(folder))).free / (1 << 30)
    except OSError as failed:  # of a network disk that is gone, for example
        return (
            f"{told}; nor can the folder be looked at ({failed}). See that its disk is mounted and lets you write, or "
            "choose another (--ckpt_path, --save_path)"
        )
    return (
        f"{told}; {free:.2f} GiB are free there. If that is too little, make room, or choose another disk "
        "(--ckpt_path, --save_path) or fewer checkpoints (--max_ckpt_num, --max_ckpt_mem; PPO keeps all "
        "copies of --save_hf_ckpt)"
    )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def check_places(cfg: TrainerOptions) -> None:
    """Before anything is trained, on the rank that writes: a path that was mistyped must not show at the end.

    Raises:
        CheckpointError: a folder that the run will write to can't be written to; names the flag.
    """
    places = {"save_path": cfg.save_path}
    if writes_checkpoints(cfg):
        places["ckpt_path"] = cfg.ckpt_path
    for flag, folder in places.items():
        path = Path(folder).absolute()
        try:
            # in the folder, and beside it: there new ones are made, and moved when they are complete
            for place in dict.fromkeys((_existing(path), _existing(path.parent))):
                tempfile.TemporaryDirectory(prefix=".openrlhf-", dir=place).cleanup()
        except OSError as error:
            told = f"--{flag} {folder} can't be written to, or not beside it, where its folders are made"
            problem = f"{told}: {error}. Choose another"
            raise CheckpointError(problem) from error


class Writes:
    """What the ranks write of one thing, and the only place that tells of a failure to.

    A failure is kept until the ranks meet: raised at once, it would leave the others in the next collective.

    Args:
        what: they do, for messages.
        target: the folder or file.
    """

    def __init__(self, what: str, target: str | Path) -> None:
        self._what = what
        self._target = target
        self._error: Exception | None = None

    def run(self, write: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Write, unless an earlier write of this rank failed. ``write`` may not wait for other ranks."""
        if self._error is not None:
            return
        try:
            write(*args, **options)
        except Exception as error:
            self._error = error

    @contextmanager
    def of_deepspeed(self, engine: Any) -> Iterator[None]:
        """Inside, an engine's files are written by :meth:`run`; its other errors pass."""
        writer = engine.checkpoint_engine
        replaced = [(writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]
        for owner, name in replaced:
            setattr(owner, name, partial(self.run, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in replaced:
                delattr(owner, name)  # the class's own is there again

    def raise_together(self) -> None:
        """Meet the other ranks; all call it.

        Raises:
            DistributedError: a write failed on some rank.
            Exception: on the rank itself, what was no failure to write comes as it is.
        """
        error = self._error
        if error is None or is_write_failure(error):
            raise_together("" if error is None else write_problem(error, self._target), self._what, error)
            return
        with suppress(RuntimeError):
            raise_together(f"{type(error).__name__}: {error}", self._what)
        raise error
