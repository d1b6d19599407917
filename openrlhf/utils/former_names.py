"""Names that users' files import from OpenRLHF and that are not here: importing one says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

_LOSSES = "openrlhf.algorithms.losses"
_LOGGERS = "runs are logged with --use_wandb and --use_tensorboard"
_LOAD = "models are loaded with transformers, or with openrlhf.models.loading"
_IMAGES = "prompts with images need no code of their own, --max_images_per_prompt is enough"

INSTEAD = {
    "openrlhf.utils.get_strategy": "the commands set DeepSpeed up themselves, from their flags",
    "openrlhf.utils.get_processor": _IMAGES,
    "openrlhf.utils.processor": f"--input_template and --apply_chat_template make prompts, and {_IMAGES}",
    "openrlhf.utils.remote_rm_utils": "use openrlhf.rollout.rewards.make_reward_source",
    "openrlhf.utils.vlm_utils": _IMAGES,
    "openrlhf.utils.config": "openrlhf.config.parse_cli reads flags",
    "openrlhf.utils.loss_utils": "use openrlhf.algorithms.aggregation",
    "openrlhf.utils.logging_utils.WandbLogger": _LOGGERS,
    "openrlhf.utils.logging_utils.TensorboardLogger": _LOGGERS,
    "openrlhf.models.Actor": f"{_LOAD}.load_causal_lm",
    "openrlhf.models.get_llm_for_sequence_regression": f"{_LOAD}.load_sequence_regression",
    "openrlhf.models.SFTLoss": f"use {_LOSSES}.cross_entropy_sum",
    "openrlhf.models.GPTLMLoss": f"use {_LOSSES}.cross_entropy_sum",
    "openrlhf.models.DPOLoss": f"use {_LOSSES}.dpo_loss",
    "openrlhf.models.LogExpLoss": f"use {_LOSSES}.pairwise_logexp_loss",
    "openrlhf.models.PairWiseLoss": f"use {_LOSSES}.pairwise_sigmoid_loss",
    "openrlhf.models.PolicyLoss": "use openrlhf.algorithms.policy_loss; --custom_algorithms adds your own",
    "openrlhf.models.ValueLoss": "use openrlhf.algorithms.value_loss",
    "openrlhf.models.aggregate_loss": "use openrlhf.algorithms.aggregation.aggregate",
    "openrlhf.datasets.PromptDataset": "use openrlhf.datasets.prompts.build_prompts",
    "openrlhf.datasets.RewardDataset": "use openrlhf.datasets.preference.build_preference_dataset",
    "openrlhf.datasets.SFTDataset": "use openrlhf.datasets.sft.build_sft_dataset",
    "openrlhf.datasets.utils": "openrlhf.datasets.sources.load_rows reads and mixes sources",
    "openrlhf.trainer.ppo_utils": "openrlhf.algorithms.shaping has the length penalties, openrlhf.algorithms.kl the KL "
    "controller, openrlhf.rollout.buffer the buffer, and openrlhf.rollout.trajectory what a sample is",
    "openrlhf.trainer.ray": "openrlhf.engines.pool starts and calls engines; an agent (--agent_func_path) or "
    "--custom_generate_function_path changes how they are used",
}


def refuse(name: str) -> None:
    """Say what to use instead of a name.

    Raises:
        ImportError: it is a name of OpenRLHF's that is not here.
    """
    if name in INSTEAD:
        raise ImportError(f"{name} of OpenRLHF does not exist here: {INSTEAD[name]}", name=name)


class _Finder:
    """Asked by `import` about modules that nothing else found, and about names that a package does not have."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        refuse(fullname)


def install() -> None:
    """Let `import` know about the names; done when the package is imported."""
    sys.meta_path.append(_Finder)
