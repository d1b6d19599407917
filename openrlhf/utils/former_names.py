"""Names that users' files import from OpenRLHF and that are not here: importing one says what to use instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import ModuleType

_LOSSES = "openrlhf.algorithms.losses"
_KL = "openrlhf.algorithms.kl"
_LOGGERS = "runs are logged with --use_wandb and --use_tensorboard"
_LOAD = "models are loaded with transformers, or with openrlhf.models.loading"
_SETUP = "the commands set DeepSpeed and process groups up themselves, from their flags"
_IMAGES = "prompts with images need no code of their own, --max_images_per_prompt is enough"
_TRAINERS = (
    "the commands train, such as openrlhf train_ppo_ray; --custom_algorithms, --custom_generate_function_path and "
    "--agent_func_path change what it does"
)
_TRAINER_NAMES = (
    *("ppo_trainer", "ppo_trainer_async", "sft_trainer", "rm_trainer", "dpo_trainer", "kto_trainer"),
    *("PPOTrainer", "SFTTrainer", "RewardModelTrainer", "DPOTrainer", "KTOTrainer"),
)

_TEACHER = (
    "it was removed from OpenRLHF, too; openrlhf train_sft trains on what a teacher wrote (openrlhf batch_inference)"
)
_FORMER_COMMANDS = {
    "train_kd": _TEACHER,
    "train_prm": "it was removed from OpenRLHF, too; openrlhf train_rm trains a reward model of whole answers",
    "train_ppo": "openrlhf train_ppo_ray trains by PPO, also on one GPU or a CPU (--colocate_all_models)",
    "interactive_chat": "it was removed from OpenRLHF, too; vllm serve and vllm chat talk to a saved model",
}

INSTEAD = {
    **{f"openrlhf.cli.{name}": instead for name, instead in _FORMER_COMMANDS.items()},
    "openrlhf.utils.get_strategy": _SETUP,
    "openrlhf.utils.get_processor": _IMAGES,
    "openrlhf.utils.deepspeed": _SETUP,
    "openrlhf.utils.distributed_util": _SETUP,
    "openrlhf.utils.processor": f"--input_template and --apply_chat_template make prompts, and {_IMAGES}",
    "openrlhf.utils.remote_rm_utils": "use openrlhf.rollout.rewards.make_reward_source",
    "openrlhf.utils.vlm_utils": _IMAGES,
    "openrlhf.utils.config": "openrlhf.config.parse_cli reads flags",
    "openrlhf.utils.loss_utils": "use openrlhf.algorithms.aggregation",
    "openrlhf.utils.logging_utils.WandbLogger": _LOGGERS,
    "openrlhf.utils.logging_utils.TensorboardLogger": _LOGGERS,
    "openrlhf.models.actor": f"{_LOAD}.load_causal_lm",
    "openrlhf.models.model": f"{_LOAD}.load_sequence_regression",
    "openrlhf.models.loss": f"use {_LOSSES}, openrlhf.algorithms.policy_loss or openrlhf.algorithms.value_loss",
    "openrlhf.models.utils": f"use {_KL} and openrlhf.algorithms.aggregation",
    "openrlhf.models.ring_attn_utils": "--ring_attn_size divides sequences among ranks",
    "openrlhf.models.compute_approx_kl": f"use {_KL}.estimate_kl",
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
    "openrlhf.datasets.prompts_dataset": "use openrlhf.datasets.prompts.build_prompts",
    "openrlhf.datasets.reward_dataset": "use openrlhf.datasets.preference.build_preference_dataset",
    "openrlhf.datasets.sft_dataset": "use openrlhf.datasets.sft.build_sft_dataset",
    "openrlhf.datasets.utils": "openrlhf.datasets.sources.load_rows reads and mixes sources",
    **{f"openrlhf.trainer.{name}": _TRAINERS for name in _TRAINER_NAMES},
    "openrlhf.trainer.ppo_utils": "openrlhf.algorithms.shaping has the length penalties, openrlhf.algorithms.kl the KL "
    "controller, openrlhf.rollout.buffer the buffer, and openrlhf.rollout.trajectory what a sample is",
    "openrlhf.trainer.ray": "openrlhf.engines.pool starts and calls engines; an agent (--agent_func_path) or "
    "--custom_generate_function_path changes how they are used",
}
_GENERAL = (
    "your files can import openrlhf.utils, openrlhf.utils.agent, openrlhf.utils.logging_utils and "
    "openrlhf.algorithms; what else a run does is set by the flags of its command"
)


def explain(name: str) -> str:
    """What to use instead of a name that is not here."""
    if name in INSTEAD:
        return f"{name} of OpenRLHF does not exist here: {INSTEAD[name]}"
    return f"{name} does not exist here: {_GENERAL}"


class _Finder:
    """Asked by `import` about modules that nothing else found, and about names that a package does not have."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Say what to use instead of a name of this package.

        Raises:
            ImportError: the name is not here, and something imports it or runs it (``python -m``). Who only asks
                `importlib.util.find_spec` gets the answer that there is none; the caller alone tells them apart.
        """
        if fullname.startswith("openrlhf.") and not _only_asked():
            raise ImportError(explain(fullname), name=fullname)


def _only_asked() -> bool:
    frame = inspect.currentframe()
    for _ in range(3):  # this function, the finder, and importlib's loop over finders
        frame = frame and frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "importlib.util":
        return False
    return frame.f_back is None or frame.f_back.f_globals.get("__name__") != "runpy"


def install() -> None:
    """Let `import` know about the names; done when the package is imported."""
    sys.meta_path.append(_Finder)
