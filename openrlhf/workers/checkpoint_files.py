"""Checkpoint folders: written beside and renamed, the newest named by ``latest``, old ones removed afterwards.

Layout below a root::

    latest                  tag of the newest complete checkpoint
    <tag>/                  DeepSpeed's shards, rng_<rank>.pt, meta.json, metric.json, average.pt (--enable_ema), and
                            tokenizer/
    .<tag>.writing/         a checkpoint that is being written (or was, when the process was killed)
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.files import folder_bytes, write_atomic

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
META = "meta.json"
LINEAGE = "lineage"
"""Entry of META: the same in all checkpoints of a run and of those that went on from it."""
CONFIG = "config"
"""Entry of META: what the run sets in the config.json of its Hugging Face folders."""
TOKENIZER = "tokenizer"
METRIC = "metric.json"
AVERAGE = "average.pt"
BEST_PREFIX = "best_"


class CheckpointError(ExplainedError, RuntimeError):
    """A checkpoint is missing, damaged or belongs to another setup; the message says what to do."""


def writing_tag(tag: str) -> str:
    """Name of the folder a checkpoint is written into before it is complete."""
    return f".{tag}.writing"


def finish_checkpoint(
    root: str | Path, tag: str, meta: dict[str, Any], metric: tuple[str | None, float | None] = (None, None)
) -> None:
    """Turn the folder being written into checkpoint ``tag`` and point ``latest`` at it (one process calls this).

    Args:
        metric: name and value of the evaluation metric a best checkpoint was chosen by.
    """
    root = Path(root)
    scratch, final = root / writing_tag(tag), root / tag
    write_atomic(scratch / METRIC, json.dumps({"metric_key": metric[0], "metric_value": metric[1]}))
    write_atomic(scratch / META, json.dumps(meta, indent=1, sort_keys=True))
    if final.exists():  # the same step saved again, for example after a resume from before it
        old = root / f".{tag}.old"
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(scratch, final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(scratch, final)
    write_atomic(root / LATEST, tag)
    if tag.startswith(BEST_PREFIX):
        for other in checkpoint_tags(root):
            if other.startswith(BEST_PREFIX) and other != tag and _lineage(root, other) == meta.get(LINEAGE):
                shutil.rmtree(root / other)


def read_meta(root: str | Path, tag: str) -> dict[str, Any]:
    """What was recorded about a checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete, or another program wrote it.
    """
    folder = Path(root) / tag
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint {tag!r} below {root}; it has: {', '.join(checkpoint_tags(root)) or 'none'}"
        )
    if not (folder / META).exists() and any(folder.glob("*_model_states.pt")):
        raise CheckpointError(
            f"checkpoint {folder} was written by another program: it has DeepSpeed's files and no {META}, so a run "
            f"can't resume from it. {_ways_on(Path(root), tag)}"
        )
    try:
        return dict(json.loads((folder / META).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} is not complete or not ours: {error}") from error


def _ways_on(root: Path, tag: str) -> str:
    """How to go on from a checkpoint that can't be read: with weights alone."""
    copy = (root.parent if root.name == "_actor" else root) / f"{tag}_hf"
    weights = copy if copy.is_dir() else "the --save_path of that run"
    return (
        f"To go on from its weights, give their Hugging Face folder ({weights}) to --pretrain, or, except for "
        "train_ppo_ray, to `openrlhf convert hf2resume`, which keeps the place in the schedule and the data; without "
        "such a folder, DeepSpeed's zero_to_fp32.py makes weights of the checkpoint. To start from the beginning, use "
        "another --ckpt_path, or no --load_checkpoint"
    )


def _lineage(root: Path, tag: str) -> str | None:
    try:
        return read_meta(root, tag).get(LINEAGE)
    except CheckpointError:
        return "damaged"


def latest_tag(root: str | Path, name: str = LATEST) -> str | None:
    """The tag that ``latest`` names; None without that file."""
    path = Path(root) / name
    return path.read_text().strip() if path.is_file() else None


def resume_tag(root: str | Path, universal: bool) -> str | None:
    """The tag to resume from; None when there is no checkpoint.

    Args:
        universal: of the newest checkpoint in DeepSpeed's universal format (``--use_ds_universal_ckpt``).

    Raises:
        CheckpointError: there are checkpoints, but none was converted, or no file says which is the newest.
    """
    tag = latest_tag(root, LATEST_UNIVERSAL if universal else LATEST)
    if tag is None and universal and latest_tag(root) is not None:
        raise CheckpointError(
            f"--use_ds_universal_ckpt: no checkpoint in {root} was converted; run `openrlhf convert universal "
            f"--ckpt_path {root}` first"
        )
    if tag is None and not universal and checkpoint_tags(root):
        raise CheckpointError(
            f"{root} has no file `{LATEST}` that names the checkpoint to resume from; write one of these names into "
            f"it: {', '.join(checkpoint_tags(root))}"
        )
    return tag


def nothing_to_resume(root: str | Path) -> str:
    """What ``--load_checkpoint`` says before a run starts from the beginning; also names copies without optimizer."""
    copies = sorted(folder.parent.name for folder in Path(root).glob("*_hf/config.json"))
    told = f"--load_checkpoint: there is no checkpoint in {root}, starting from the beginning"
    if copies:
        told += f"; {', '.join(copies)} have weights only: give one to --pretrain, or to `openrlhf convert hf2resume`"
    return told


def earlier_run(root: str | Path) -> str | None:
    """What a run is told that starts from the beginning where an earlier one has checkpoints; None where none has."""
    tags = checkpoint_tags(root)
    if not tags:
        return None
    return (
        f"{root} has checkpoints of an earlier run, the newest is {latest_tag(root) or tags[-1]}; this run starts from "
        "the beginning (--load_checkpoint goes on from there). It keeps them, but replaces those of the steps that it "
        "saves itself"
    )


def checkpoint_tags(root: str | Path) -> list[str]:
    """Complete checkpoints below ``root``, oldest first."""
    folders = [f for f in Path(root).glob("*") if (f / META).is_file() and not f.name.startswith(".")]
    return [f.name for f in sorted(folders, key=lambda f: ((f / META).stat().st_mtime_ns, f.name))]


def rotate_checkpoints(root: str | Path, max_num: int, max_mem_gib: float) -> list[str]:
    """Remove the oldest checkpoints beyond a number or a total size, and their ``_hf`` copies in the same folder.

    The newest checkpoint, those whose tag begins with ``best_``, and those of other runs than the newest's are never
    removed. Called after a write, so a complete checkpoint exists at every moment.

    Returns:
        Tags removed.
    """
    root = Path(root)
    keep = latest_tag(root)
    own = None if keep is None else _lineage(root, keep)
    regular = [t for t in checkpoint_tags(root) if not t.startswith(BEST_PREFIX) and _lineage(root, t) == own]
    removed: list[str] = []

    def too_much() -> bool:
        sizes = sum(folder_bytes(root / f"{t}{e}") for t in regular for e in ("", "_hf")) if max_mem_gib < 1e7 else 0
        return len(regular) > max(1, max_num) or sizes > max_mem_gib * (1 << 30)

    while len(regular) > 1 and too_much():
        tag = next((t for t in regular if t != keep), None)
        if tag is None:
            break
        regular.remove(tag)
        removed.append(tag)
        shutil.rmtree(root / tag)
        shutil.rmtree(root / f"{tag}_hf", ignore_errors=True)
    for stale in root.glob(".*.writing"):  # left by a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    return removed


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's random generators in this process."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what :func:`rng_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
