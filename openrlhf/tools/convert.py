"""Training checkpoints as Hugging Face folders or for any number of ranks, and made of such folders (``convert``)."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.config import ConvertConfig
from openrlhf.models.folder import require_head
from openrlhf.models.loading import load_causal_lm, load_sequence_regression, load_tokenizer
from openrlhf.models.logprobs import PolicyModel, RewardModel
from openrlhf.tools.errors import ToolError
from openrlhf.tools.loading import LoadSettings, load_for_inference
from openrlhf.tools.output import check_output, write_model
from openrlhf.tools.verify import answers
from openrlhf.utils.files import temporary_folder, write_atomic
from openrlhf.utils.logging import get_logger
from openrlhf.workers.checkpoint_files import (
    CONFIG,
    LATEST_UNIVERSAL,
    META,
    TOKENIZER,
    checkpoint_tags,
    latest_tag,
    read_meta,
)
from openrlhf.workers.deepspeed_engine import TrainEngine
from openrlhf.workers.distributed import init_distributed
from openrlhf.workers.optimizer import OptimizerSpec, SchedulerSpec

logger = get_logger(__name__)

COMMAND = "convert"
_WRAPPER = "model."  # the trained module holds the transformers model under this name
_UNIVERSAL_SUFFIX = "_uni"
_PPO_PARTS = ("_actor", "_critic")
_HOW_TO_RESUME = "; resume on any number of ranks with --load_checkpoint --use_ds_universal_ckpt"


def convert(cfg: ConvertConfig) -> str:
    """Do what ``--task`` says; a sentence about what was done.

    Raises:
        ToolError: the checkpoint can't be converted, or the result differs from it; nothing is written then.
        ModelLoadError, CheckpointError: the model or the checkpoint can't be read.
    """
    if cfg.task == "hf2resume":
        return _from_hf(cfg)
    root, tag = find_checkpoint(str(cfg.ckpt_path), cfg.tag)
    return _to_universal(root, tag, cfg) if cfg.task == "universal" else _to_hf(root, tag, cfg)


def find_checkpoint(ckpt_path: str, tag: str | None) -> tuple[Path, str]:
    """Folder of checkpoints and tag, from the folder (with or without a tag) or from a checkpoint's own folder.

    Raises:
        ToolError: there is no such checkpoint; tells what is there.
        CheckpointError: it is incomplete.
    """
    root = Path(ckpt_path).absolute()
    if tag is None and (root / META).is_file():
        root, tag = root.parent, root.name
    tag = tag or latest_tag(root)
    if tag is None:
        parts = [name for name in _PPO_PARTS if (root / name).is_dir()]
        if parts:
            raise ToolError(f"{ckpt_path} is of a PPO run; give {' or '.join(str(root / part) for part in parts)}")
        raise ToolError(
            f"{ckpt_path} has no file `latest`, so it is no folder of checkpoints (checkpoints in it: "
            f"{', '.join(checkpoint_tags(root)) or 'none'}); give the --ckpt_path of the run, or name one with --tag"
        )
    if read_meta(root, tag).get("tensor_parallel_size", 1) > 1:
        raise ToolError(
            f"{root / tag} was written with --ds_tensor_parallel_size, whose parts can't be converted; resume the run "
            "with --save_hf_ckpt, which writes whole models"
        )
    return root, tag


# ------------------------------------------------------------------------------------------------- Hugging Face


def checkpoint_weights(root: Path, tag: str) -> Iterator[tuple[str, Tensor]]:
    """The float32 weights of a checkpoint under their names in the transformers model, one after another.

    Raises:
        ToolError: files are missing or damaged, or the weights are those of an adapter.
    """
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    plain = root / tag / "mp_rank_00_model_states.pt"
    sharded = any((root / tag).glob("*_optim_states.pt"))
    try:
        if sharded:
            noise = io.StringIO()
            with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
                state: Any = get_fp32_state_dict_from_zero_checkpoint(str(root), tag, lazy_mode=True)
        else:
            state = torch.load(plain, map_location="cpu", weights_only=False, mmap=True)["module"]
    except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
        raise ToolError(f"checkpoint {root / tag} can't be read: {type(error).__name__}: {error}") from error
    if any(".lora_" in name for name in state):
        raise ToolError(
            f"checkpoint {root / tag} has LoRA adapters, which zero2hf does not write; --save_hf_ckpt "
            "writes them beside each checkpoint, and lora_combiner merges them"
        )
    for name in list(state):
        yield name.removeprefix(_WRAPPER), state[name].contiguous().detach().float()


def _to_hf(root: Path, tag: str, cfg: ConvertConfig) -> str:
    assert cfg.pretrain and cfg.output_path
    output = check_output(cfg.output_path, COMMAND, {"ckpt_path": str(root / tag), "pretrain": cfg.pretrain})
    updates = dict(read_meta(root, tag).get(CONFIG, {}))
    kept = root / tag / TOKENIZER  # a checkpoint of an earlier release has none
    source = str(kept) if kept.is_dir() else cfg.pretrain
    tokenizer = load_tokenizer(source)
    settings = LoadSettings(param_dtype="fp32")
    # a reward model may have started from a language model
    head = updates.get("value_head_prefix") or cfg.value_head_prefix
    model = load_for_inference(cfg.pretrain, settings, is_rm=cfg.is_rm, head_prefix=head, init_head=True)
    count = _fill(model, root, tag, cfg.pretrain)
    before = answers(model, tokenizer, cfg.is_rm) if cfg.verify else []
    facts = {"checkpoint": str(root / tag), "pretrain": cfg.pretrain, "param_dtype": cfg.param_dtype}
    verified = write_model(model, tokenizer, output, cfg, before, {"command": COMMAND} | facts, updates)
    told = (
        f"wrote {count} weights of {root / tag} to {cfg.output_path}, with the tokenizer and chat template of {source}"
    )
    if cfg.is_rm:
        told += f", and {'the' if 'mean' in updates else 'no'} mean and std of the scores for --normalize_reward"
    return told + verified


@torch.no_grad()
def _fill(model: nn.Module, root: Path, tag: str, pretrain: str) -> int:
    """Copy a checkpoint's weights into a model; their number.

    Raises:
        ToolError: names or shapes are not those of the model.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    unknown = []
    count = 0
    hint = f"is --pretrain {pretrain} the model that the run started from, and --is_rm right?"
    for name, tensor in checkpoint_weights(root, tag):
        parameter = parameters.get(name)
        if parameter is None:
            unknown.append(name)
        elif parameter.shape != tensor.shape:
            raise ToolError(
                f"{name} is {list(tensor.shape)} in {root / tag} and {list(parameter.shape)} in {pretrain}; {hint}"
            )
        else:
            parameter.copy_(tensor)
            seen.add(id(parameter))
            count += 1
    buffers = dict(model.named_buffers())
    unknown = [name for name in unknown if name not in buffers]
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in seen]
    if unknown or missing:
        raise ToolError(
            f"{root / tag} lacks {len(missing)} weights of {pretrain} and has {len(unknown)} others, for example "
            f"{(missing + unknown)[0]}; {hint}"
        )
    return count


# ------------------------------------------------------------------------------------------------- universal


def _to_universal(root: Path, tag: str, cfg: ConvertConfig) -> str:
    """Write ``<tag>_uni`` beside the checkpoint, and point ``latest_universal`` at it."""
    meta = read_meta(root, tag)
    if not any((root / tag).glob("*_optim_states.pt")):
        raise ToolError(
            f"{root / tag} was written with --zero_stage {meta.get('zero_stage')}, which keeps no optimizer files to "
            "convert; train with --zero_stage 1, 2 or 3"
        )
    name = f"{tag}{_UNIVERSAL_SUFFIX}"
    with _new_universal(root / tag, root / name, cfg) as made:
        verified = "; " + _compare_universal(checkpoint_weights(root, tag), made) if cfg.verify else ""
    return f"wrote {root / name}{verified}{_HOW_TO_RESUME}"


@contextlib.contextmanager
def _new_universal(source: Path, target: Path, cfg: ConvertConfig) -> Iterator[Path]:
    """A checkpoint in universal format, which gets to its place, and is the latest one, when all is well with it."""
    with temporary_folder(target) as scratch:
        made = scratch / target.name
        made.mkdir()
        _run_deepspeed(source, made, cfg.convert_workers)
        yield made
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)
    write_atomic(target.parent / LATEST_UNIVERSAL, target.name)


def _run_deepspeed(source: Path, target: Path, workers: int) -> None:
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        # notes of tensor-parallel training, which other checkpoints don't have
        inject_missing_state=True,
    )
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            ds_to_universal(arguments)
    except (OSError, RuntimeError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
        last = "\n".join(noise.getvalue().splitlines()[-5:])
        raise ToolError(f"DeepSpeed can't convert {source}: {type(error).__name__}: {error}\n{last}") from error


def _compare_universal(weights: Iterable[tuple[str, Tensor]], made: Path, expected: int | None = None) -> str:
    """Compare float32 weights with those of a universal checkpoint.

    Args:
        expected: how many there have to be; None = the weights come also under second names, which are left out.

    Raises:
        ToolError: they differ, or some are not there.
    """
    worst, count = 0.0, 0
    for name, tensor in weights:
        file = made / "zero" / (_WRAPPER + name) / "fp32.pt"
        if not file.is_file():
            continue  # the second name of a tied weight
        content = torch.load(file, map_location="cpu", weights_only=False)
        other = content["param"] if isinstance(content, dict) else content
        worst = max(worst, float((tensor.flatten() - other.detach().float().flatten()).abs().max()))
        count += 1
    if worst > 0 or count == 0 or count != (expected or count):
        total = f" of {expected}" if expected else ""
        raise ToolError(f"{count}{total} weights compared, and they differ by up to {worst:.3g}; nothing was written")
    return f"largest difference of {count} weights: 0"


# ------------------------------------------------------------------------------------------------- from Hugging Face


def _from_hf(cfg: ConvertConfig) -> str:
    """Write ``global_step<N>_uni`` with the weights of a Hugging Face folder, and point ``latest_universal`` at it."""
    assert cfg.pretrain
    tag = f"global_step{cfg.resume_step}"
    name = f"{tag}{_UNIVERSAL_SUFFIX}"
    root = Path(str(cfg.ckpt_path)).absolute()
    _check_target(root, name)
    if init_distributed().size > 1:
        raise ToolError("hf2resume works in one process, for any number of ranks: start it without a launcher")
    engine = _fresh_engine(cfg)
    with temporary_folder(root / name) as scratch:
        engine.save_checkpoint(scratch, tag, {"consumed_samples": cfg.consumed_samples})
        del engine
        told = (
            f"wrote {root / name}: weights of {cfg.pretrain}, a new optimizer, step {cfg.resume_step}, "
            f"{cfg.consumed_samples} samples consumed"
        )
        with _new_universal(scratch / tag, root / name, cfg) as made:
            if cfg.verify:
                settings = LoadSettings(param_dtype=cfg.param_dtype)
                source = load_for_inference(cfg.pretrain, settings, is_rm=cfg.is_rm, head_prefix=cfg.value_head_prefix)
                weights = ((key, parameter.detach().float()) for key, parameter in source.named_parameters())
                told += "; " + _compare_universal(weights, made, sum(1 for _ in source.parameters()))
    return told + _HOW_TO_RESUME


def _check_target(root: Path, name: str) -> None:
    """Refuse folders in which the new checkpoint would take the place of another.

    Raises:
        ToolError: tells what is there.
    """
    if root.name in _PPO_PARTS:
        raise ToolError(
            f"{root} is of a PPO run, which resumes only with the state of its prompts and rollouts, and a Hugging "
            "Face folder does not have it; start train_ppo_ray with --pretrain"
        )
    there = latest_tag(root, LATEST_UNIVERSAL) or (name if (root / name).exists() else None)
    if there is not None:
        raise ToolError(
            f"{root} has the checkpoint {there} in universal format already; choose another --ckpt_path, or remove "
            f"{there} and {LATEST_UNIVERSAL}"
        )


def _fresh_engine(cfg: ConvertConfig) -> TrainEngine:
    """The engine of a run that starts from ``--pretrain``, after ``--resume_step`` steps that changed nothing."""
    assert cfg.pretrain
    # one rank would run ZeRO-3 as ZeRO-2 if it were not for a universal checkpoint
    settings = LoadSettings(param_dtype=cfg.param_dtype, zero_stage=cfg.zero_stage, use_ds_universal_ckpt=True)
    module: nn.Module
    if cfg.is_rm:
        require_head(cfg.pretrain, cfg.value_head_prefix)
        model = load_sequence_regression(cfg.pretrain, settings, head_prefix=cfg.value_head_prefix)
        module = RewardModel(model, packing=False)
    else:
        module = PolicyModel(load_causal_lm(cfg.pretrain, settings), packing=False)
    # rates and decay are those of the flags of the run that resumes
    engine = TrainEngine(module, settings, OptimizerSpec(1e-6), SchedulerSpec("constant", 1))
    engine.step_count = cfg.resume_step
    inner: Any = engine._engine
    inner.global_steps = cfg.resume_step
    inner.lr_scheduler.done = float(cfg.resume_step)
    # AdamW makes its state in the first step; without it there would be nothing to convert
    zero = inner.optimizer
    stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for part in zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups:
        moments = {key: torch.zeros_like(part) for key in ("exp_avg", "exp_avg_sq")}
        zero.optimizer.state[part] = {"step": torch.tensor(0.0), **moments}
    return engine
