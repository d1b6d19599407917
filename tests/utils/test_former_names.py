"""What users' files import from OpenRLHF is here, or the error says what to use instead."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import openrlhf.utils.logging_utils
from openrlhf.config.commands import PPOConfig
from openrlhf.config.flag import flag_specs
from openrlhf.utils import extract_boxed_answer, get_tokenizer, grade_answer
from openrlhf.utils.former_names import INSTEAD
from openrlhf.utils.logging_utils import init_logger
from openrlhf.utils.tiny_model import make_tiny_model

ABSENT = {
    "openrlhf.utils": "get_strategy get_processor",
    "openrlhf.utils.deepspeed": "DeepspeedStrategy",
    "openrlhf.utils.distributed_util": "init_process_group torch_dist_barrier_and_cuda_sync",
    "openrlhf.utils.logging_utils": "WandbLogger TensorboardLogger",
    "openrlhf.models": "Actor SFTLoss DPOLoss GPTLMLoss LogExpLoss PairWiseLoss PolicyLoss ValueLoss "
    "get_llm_for_sequence_regression aggregate_loss compute_approx_kl",
    "openrlhf.models.actor": "Actor",
    "openrlhf.models.loss": "PolicyLoss",
    "openrlhf.models.model": "get_llm_for_sequence_regression",
    "openrlhf.models.utils": "compute_approx_kl masked_mean",
    "openrlhf.datasets": "PromptDataset RewardDataset SFTDataset",
    "openrlhf.datasets.prompts_dataset": "PromptDataset",
    "openrlhf.datasets.utils": "blending_datasets exist_and_not_none",
    "openrlhf.trainer": "PPOTrainer SFTTrainer",
    "openrlhf.trainer.ppo_trainer": "PPOTrainer",
    "openrlhf.trainer.ppo_utils": "Experience NaiveReplayBuffer AdaptiveKLController FixedKLController "
    "apply_length_penalties balance_experiences make_experience_batch split_experience_batch",
    "openrlhf.trainer.ray": "create_vllm_engines batch_vllm_engine_call",
    "openrlhf.trainer.ray.vllm_engine": "LLMRayActor RolloutRayActor",
    "openrlhf.utils.vlm_utils": "process_prompt_with_images",
    "openrlhf.utils.config": "hierarchize",
    "openrlhf.utils.loss_utils": "get_loss_batch_info",
    "openrlhf.utils.remote_rm_utils": "remote_rm_fn",
    "openrlhf.utils.processor": "get_processor",
    **{f"openrlhf.cli.{name}": "main" for name in ("train_kd", "train_prm", "train_ppo", "interactive_chat")},
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in ABSENT for name in ABSENT[module].split()])
def test_a_name_that_is_not_here_says_what_to_use(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=r"^openrlhf\.[\w.]+ of OpenRLHF does not exist here: \S") as caught:
        exec(f"from {module} import {name}")
    assert str(caught.value).startswith((f"{module}.{name} of", f"{module} of", f"{module.rpartition('.')[0]} of"))


@pytest.mark.parametrize("text", sorted(set(INSTEAD.values())))
def test_what_to_use_instead_exists(text: str) -> None:
    for name in re.findall(r"openrlhf\.\w[\w.]*\w", text):
        assert pkgutil.resolve_name(name) is not None
    for flag in re.findall(r"--(\w+)", text):
        assert flag in flag_specs(PPOConfig)


@pytest.mark.parametrize("name", INSTEAD)
def test_no_name_is_called_absent_that_is_here(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        return
    assert attribute not in vars(owner)


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import openrlhf.utils.nothing", "openrlhf.utils.nothing"),
        ("import openrlhf.nothing", "openrlhf.nothing"),
        ("from openrlhf.models import nothing", "openrlhf.models.nothing"),
        ("from openrlhf.trainer import Nothing", "openrlhf.trainer.Nothing"),
        ("from openrlhf.utils.agent import nothing", "openrlhf.utils.agent.nothing"),
        ("from openrlhf.utils.logging_utils import nothing", "openrlhf.utils.logging_utils.nothing"),
    ],
)
def test_other_names_say_what_can_be_imported(statement: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} does not exist here: your files can import") as caught:
        exec(statement)
    for module in re.findall(r"openrlhf[.\w]+\w", str(caught.value).partition(": ")[2]):
        importlib.import_module(module)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in ABSENT for name in ABSENT[module].split()])
def test_a_name_can_be_asked_for(module: str, name: str) -> None:
    """Nothing is imported, so there is no error."""
    if importlib.util.find_spec(module.rpartition(".")[0]) is None:
        return
    if importlib.util.find_spec(module) is None:
        with pytest.raises(ImportError, match="does not exist here"):
            importlib.import_module(module)
        return
    assert not hasattr(importlib.import_module(module), name)
    assert importlib.util.find_spec(f"{module}.{name}") is None


def test_a_name_of_a_module_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match="WandbLogger of OpenRLHF does not exist here: runs are logged"):
        _ = openrlhf.utils.logging_utils.WandbLogger


def test_init_logger() -> None:
    logger = init_logger("reward_func")
    assert isinstance(logger, logging.Logger) and logger.name.endswith("reward_func")
    assert logger.isEnabledFor(logging.INFO) and logger.hasHandlers()


def test_get_tokenizer_has_the_former_arguments(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model: Any = SimpleNamespace(config=SimpleNamespace(pad_token_id=None))
    left = get_tokenizer(folder, model, "left", None, use_fast=True)
    right = get_tokenizer(folder, None, padding_side="right", strategy=object())
    assert (left.padding_side, right.padding_side) == ("left", "right")
    assert model.config.pad_token_id == left.pad_token_id == right.pad_token_id is not None
    padded = left(["1+1=2", "1"], padding=True)["input_ids"]
    assert len(padded[0]) == len(padded[1]) and padded[1][0] == left.pad_token_id


def test_answer_helpers_are_at_their_former_place() -> None:
    assert extract_boxed_answer(r"so \boxed{4}") == "4" and grade_answer("4", "4")
