"""The configuration of each command: its concern groups, its own flags, and where its defaults differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openrlhf.config.flag import OptionGroup, flag, redefault
from openrlhf.config.options_algorithm import ActorCriticOptions, AlgorithmOptions, RewardOptions
from openrlhf.config.options_data import (
    DataOptions,
    PreferenceDataOptions,
    PromptDataOptions,
    SFTDataOptions,
)
from openrlhf.config.options_model import (
    CheckpointOptions,
    DeepSpeedOptions,
    LoadOptions,
    LoggingOptions,
    ModelOptions,
    OptimizerOptions,
    PrecisionOptions,
    TrainOptions,
    ValueHeadOptions,
)
from openrlhf.config.options_ppo import (
    EngineOptions,
    EvalOptions,
    PlacementOptions,
    RolloutOptions,
    SamplingOptions,
)


@dataclass(kw_only=True)
class TrainerOptions(ModelOptions, TrainOptions, OptimizerOptions, DeepSpeedOptions, CheckpointOptions, LoggingOptions):
    """What every training command has."""


@dataclass(kw_only=True)
class SupervisedOptions(TrainerOptions):
    title: ClassVar[str] = "Optimizer"

    learning_rate: float = flag(5e-6, "peak learning rate", "adam.lr")


@dataclass(kw_only=True)
class SFTConfig(SFTDataOptions, SupervisedOptions):
    """train_sft: supervised fine-tuning, or continued pre-training."""

    max_epochs: int = redefault(TrainOptions, "max_epochs", 2)
    input_template: str | None = redefault(DataOptions, "input_template", "User: {}\nAssistant: ")
    ckpt_path: str = redefault(CheckpointOptions, "ckpt_path", "./ckpt/checkpoints_sft")
    wandb_project: str = redefault(LoggingOptions, "wandb_project", "openrlhf_train_sft")


@dataclass(kw_only=True)
class RMConfig(PreferenceDataOptions, ValueHeadOptions, SupervisedOptions):
    """train_rm: a reward model from pairs of answers."""

    title: ClassVar[str] = "Reward model loss"

    loss: str = flag(
        "sigmoid", "pairwise loss: log-sigmoid or log-exp", "model.loss_type", choices=("sigmoid", "logexp")
    )
    margin_loss: bool = flag(False, "ask for the data's margin between the two rewards", "model.margin_loss_enable")
    compute_fp32_loss: bool = flag(
        False, "compute the loss in fp32 whatever param_dtype is", "model.compute_fp32_loss_enable"
    )
    learning_rate: float = redefault(SupervisedOptions, "learning_rate", 9e-6)
    micro_train_batch_size: int = redefault(TrainOptions, "micro_train_batch_size", 1)
    max_len: int = redefault(DataOptions, "max_len", 512)
    ckpt_path: str = redefault(CheckpointOptions, "ckpt_path", "./ckpt/checkpoints_rm")
    wandb_project: str = redefault(LoggingOptions, "wandb_project", "openrlhf_train_rm")


@dataclass(kw_only=True)
class DPOConfig(PreferenceDataOptions, SupervisedOptions):
    """train_dpo: direct preference optimization, its IPO and conservative variants."""

    title: ClassVar[str] = "DPO loss"

    beta: float = flag(0.1, "how strongly the reference model holds", "model.beta")
    ipo: bool = flag(False, "the squared loss of IPO", "model.ipo_enable")
    label_smoothing: float = flag(0.0, "share of the pairs taken to be labelled wrongly", "model.label_smoothing")
    nll_loss_coef: float = flag(0.0, "weight of the chosen answer's negative log-likelihood", "model.nll_loss_coef")
    ref_pretrain: str | None = flag(None, "reference model; as pretrain if not given", "ref.model_name_or_path")
    ref_offload: bool = redefault(PlacementOptions, "ref_offload", False)
    learning_rate: float = redefault(SupervisedOptions, "learning_rate", 1e-5)
    max_len: int = redefault(DataOptions, "max_len", 512)
    eval_split: str = redefault(DataOptions, "eval_split", "test")
    ckpt_path: str = redefault(CheckpointOptions, "ckpt_path", "./ckpt/checkpoints_dpo")
    wandb_project: str = redefault(LoggingOptions, "wandb_project", "openrlhf_train_dpo")


@dataclass(kw_only=True)
class PPOConfig(
    PromptDataOptions,
    RewardOptions,
    SamplingOptions,
    RolloutOptions,
    AlgorithmOptions,
    ActorCriticOptions,
    PlacementOptions,
    EngineOptions,
    EvalOptions,
    ValueHeadOptions,
    TrainerOptions,
):
    """train_ppo_ray: PPO and its relatives, with models and rollout engines placed by Ray."""

    micro_train_batch_size: int = redefault(TrainOptions, "micro_train_batch_size", 4)
    max_samples: int = redefault(DataOptions, "max_samples", 100_000_000)
    ckpt_path: str = redefault(CheckpointOptions, "ckpt_path", "./ckpt/checkpoints_ppo_ray")
    wandb_project: str = redefault(LoggingOptions, "wandb_project", "openrlhf_train_ppo")


@dataclass(kw_only=True)
class ServeRMConfig(LoadOptions, ValueHeadOptions):
    """serve_rm: a reward model behind HTTP."""

    title: ClassVar[str] = "Server"

    reward_pretrain: str | None = redefault(RewardOptions, "reward_pretrain", None)
    normalize_reward: bool = redefault(RewardOptions, "normalize_reward", False)
    max_len: int = redefault(DataOptions, "max_len", 2048)
    port: int = flag(5000, "port to listen on", "port")
    host: str = flag("0.0.0.0", "address to listen on", "host")
    batch_size: int | None = flag(None, "texts scored at once; all of a request if not given", "batch_size")


@dataclass(kw_only=True)
class LoraCombinerConfig(PrecisionOptions):
    """lora_combiner: merge a LoRA adapter into its base model."""

    title: ClassVar[str] = "Merging"

    model_path: str | None = flag(None, "base model: a local folder or a hub id", "model_path")
    lora_path: str | None = flag(None, "folder of the adapter", "lora_path")
    output_path: str | None = flag(None, "folder for the merged model and its tokenizer", "output_path")
    is_rm: bool = flag(False, "the base model is a reward model", "is_rm")


CommandConfig = SFTConfig | RMConfig | DPOConfig | PPOConfig | ServeRMConfig | LoraCombinerConfig


@dataclass(frozen=True)
class Command:
    """A command of the product.

    Attributes:
        config: its config class.
        summary: one line for ``--help``.
        example: a command line that works, without the name of the command.
    """

    config: type[OptionGroup]
    summary: str
    example: str


COMMANDS: dict[str, Command] = {
    "train_sft": Command(
        SFTConfig,
        "Supervised fine-tuning.",
        "--pretrain ./model --dataset ./data.jsonl --input_key question --output_key answer \\\n"
        "    --train_batch_size 64 --micro_train_batch_size 8 --max_len 2048 --save_path ./sft",
    ),
    "train_rm": Command(
        RMConfig,
        "Train a reward model on pairs of answers.",
        "--pretrain ./sft --dataset ./pairs.jsonl --prompt_key prompt --chosen_key chosen \\\n"
        "    --rejected_key rejected --train_batch_size 64 --save_path ./rm",
    ),
    "train_dpo": Command(
        DPOConfig,
        "Direct preference optimization.",
        "--pretrain ./sft --dataset ./pairs.jsonl --prompt_key prompt --beta 0.1 \\\n"
        "    --train_batch_size 64 --micro_train_batch_size 4 --save_path ./dpo",
    ),
    "train_ppo_ray": Command(
        PPOConfig,
        "Reinforcement learning with PPO, REINFORCE, RLOO, GRPO and others.",
        "--pretrain ./sft --prompt_data ./prompts.jsonl --input_key question --label_key answer \\\n"
        "    --remote_rm_url ./reward.py --advantage_estimator group_norm --n_samples_per_prompt 8 \\\n"
        "    --actor_num_gpus_per_node 1 --ref_num_gpus_per_node 1 --colocate_all_models \\\n"
        "    --rollout_batch_size 64 --train_batch_size 128 --max_new_tokens 512 --save_path ./ppo",
    ),
    "serve_rm": Command(
        ServeRMConfig,
        "Serve a reward model over HTTP.",
        "--reward_pretrain ./rm --port 5000 --max_len 4096",
    ),
    "lora_combiner": Command(
        LoraCombinerConfig,
        "Merge a LoRA adapter into its base model.",
        "--model_path ./base --lora_path ./adapter --output_path ./merged",
    ),
}
