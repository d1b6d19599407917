"""Whether a run can go on from a checkpoint, found out before DeepSpeed reads it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from openrlhf.workers.checkpoint_files import CheckpointError, read_meta

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Setup:
    """What decides which checkpoints a run can read.

    Attributes:
        zero_stage: the ZeRO stage that runs.
        asked_stage: ``--zero_stage``.
        trained: shape of each trained weight by name; of one that ranks share, this rank's part.
        tensor_parallel_size: ranks that share each layer.
    """

    world_size: int
    zero_stage: int
    asked_stage: int
    param_dtype: str
    trained: Shapes
    tensor_parallel_size: int = 1


def check_fit(root: str | Path, tag: str, run: Setup, universal: bool) -> None:
    """Refuse a checkpoint that DeepSpeed could not read into this run, or would read wrongly.

    Raises:
        CheckpointError: tells what differs, and what to do.
    """
    wrong = _other_format(root, tag, run) if universal else _other_partitions(root, tag, run)
    difference = "" if wrong else _other_weights(root, tag, run.trained)
    if difference:
        wrong.append(f"{difference}. Resume with the model, --lora_rank and --target_modules of that run")
    if wrong:
        raise CheckpointError(f"cannot resume from {Path(root) / tag}: {'; '.join(wrong)}")


def _other_partitions(root: str | Path, tag: str, run: Setup) -> list[str]:
    saved = read_meta(root, tag)
    convert = f"run `openrlhf convert universal --ckpt_path {root}` and add --use_ds_universal_ckpt"
    wrong = []
    if saved["param_dtype"] != run.param_dtype:
        wrong.append(f"--param_dtype was {saved['param_dtype']}, is {run.param_dtype}")
    if saved["world_size"] != run.world_size:
        wrong.append(
            f"it was written by {saved['world_size']} ranks and this run has {run.world_size} (start with the same "
            f"number, or {convert})"
        )
    elif saved["zero_stage"] == run.asked_stage != run.zero_stage:
        wrong.append(f"it has the partitions of several ranks' ZeRO-{saved['zero_stage']} ({convert})")
    elif saved["zero_stage"] != run.zero_stage:
        wrong.append(f"--zero_stage was {saved['zero_stage']}, is {run.asked_stage}")
    if saved.get("tensor_parallel_size", 1) != run.tensor_parallel_size:
        wrong.append(f"--ds_tensor_parallel_size was {saved.get('tensor_parallel_size', 1)}")
    return wrong


def _other_format(root: str | Path, tag: str, run: Setup) -> list[str]:
    """The universal format fits any number of ranks and any dtype, but ZeRO-3 writes and reads one of its own."""
    if run.asked_stage == 0 and run.param_dtype == "fp32":
        return ["--zero_stage 0 with fp32 reads nothing in the universal format; take the stage of that run"]
    by_layers = _state_file(root, tag).name.startswith("zero_pp_")
    if by_layers == (run.zero_stage == 3):
        return []
    written = "--zero_stage 3" if by_layers else "--zero_stage 1 or 2"
    return [f"it was made by a run with {written}, and --zero_stage {run.asked_stage} can't read it; take {written}"]


def _state_file(root: str | Path, tag: str) -> Path:
    folder = Path(root) / tag
    files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not files:
        raise CheckpointError(f"{folder} is no checkpoint, or not complete: it has no file *mp_rank_00_model_states.pt")
    return files[0]


def _other_weights(root: str | Path, tag: str, trained: Shapes) -> str:
    """How the weights of a checkpoint differ from the trained ones, in words; empty when they don't."""
    path = _state_file(root, tag)
    try:
        state = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
        groups = state["param_shapes"]  # of trained weights; without ZeRO it is None
        saved = {name: tuple(shape) for group in groups or [] for name, shape in group.items()}
        if groups is None:
            saved = {name: tuple(t.shape) for name, t in state["module"].items() if name in trained}
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    told = []
    lacking = [name for name in trained if name not in saved]
    if lacking:
        told.append(f"it lacks {len(lacking)} of the {len(trained)} weights that this run trains ({lacking[0]})")
    further = [name for name in saved if name not in trained]
    if further:
        told.append(f"it has {len(further)} weights that this run doesn't train ({further[0]})")
    for name in [name for name in trained if name in saved and saved[name] != trained[name]][:1]:
        told.append(f"weights have another shape ({name}: {list(saved[name])}, here {list(trained[name])})")
    return " and ".join(told)
