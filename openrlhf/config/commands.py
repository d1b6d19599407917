"""The configuration of each command: its concern groups, its own flags, and where its defaults differ."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from openrlhf.config.flag import OptionGroup, flag, redefault
from openrlhf.config.options_algorithm import ActorCriticOptions, AlgorithmOptions, RewardOptions
from openrlhf.config.options_data import (
    DataOptions,
    InputOptions,
    PreferenceDataOptions,
    PromptDataOptions,
    SFTDataOptions,
    SupervisedDataOptions,
)
from openrlhf.config.options_model import (
    CheckpointOptions,
    DeepSpeedOptions,
    EngineModelOptions,
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
    HookOptions,
    PlacementOptions,
    RolloutOptions,
    SamplingOptions,
)


@dataclass(kw_only=True)
class TrainerOptions(EngineModelOptions, TrainOptions, OptimizerOptions, CheckpointOptions, LoggingOptions):
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
        False,
        "compute the loss in fp32 whatever param_dtype is",
        "model.compute_fp32_loss_enable",
        no_effect="scores and losses are always in fp32",
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
class KTOConfig(SupervisedDataOptions, InputOptions, SupervisedOptions):
    """train_kto: Kahneman-Tversky optimization, from single answers labelled good or bad."""

    title: ClassVar[str] = "KTO loss"

    beta: float = redefault(DPOConfig, "beta", 0.01)
    desirable_loss_weight: float = flag(1.0, "weight of the good answers in the loss", since="old")
    undesirable_loss_weight: float = flag(1.0, "weight of the bad answers in the loss", since="old")
    ref_offload: bool = redefault(PlacementOptions, "ref_offload", False)
    output_key: str | None = redefault(SFTDataOptions, "output_key", None)
    label_key: str = flag("label", "column with 1 or true for good answers, 0 or false for bad ones", "data.label_key")
    learning_rate: float = redefault(SupervisedOptions, "learning_rate", 1e-5)
    input_template: str | None = redefault(DataOptions, "input_template", "User: {}\nAssistant: ")
    eval_split: str = redefault(DataOptions, "eval_split", "test")
    ckpt_path: str = redefault(CheckpointOptions, "ckpt_path", "./ckpt/checkpoints_kto")
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
    HookOptions,
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
    batch_size: int | None = flag(
        None, "texts scored at once, from all requests that wait; 32 if not given", "batch_size"
    )
    workers: int = flag(1, "processes that share the port, each with the model; one for each GPU", since="new")
    queue_size: int = flag(
        1024, "texts that may wait in a process; requests beyond are told to come back later", since="new"
    )
    max_body_mib: int = flag(16, "largest request in MiB", since="new")


@dataclass(kw_only=True)
class LoraCombinerConfig(PrecisionOptions):
    """lora_combiner: merge a LoRA adapter into its base model."""

    title: ClassVar[str] = "Merging"

    model_path: str | None = flag(None, "base model: a local folder or a hub id", "model_path")
    lora_path: str | None = flag(None, "folder of the adapter", "lora_path")
    output_path: str | None = flag(None, "folder for the merged model and its tokenizer", "output_path")
    is_rm: bool = flag(False, "the base model is a reward model", "is_rm")
    verify: bool = flag(
        False,
        "compare the result with what it was made of on fixed texts, and print the largest difference",
        since="new",
    )


@dataclass(kw_only=True)
class ConvertConfig(PrecisionOptions, ValueHeadOptions):
    """convert: a training checkpoint into another format, or from a Hugging Face folder."""

    title: ClassVar[str] = "Conversion"

    task: str | None = flag(
        None,
        "what to make: zero2hf is a Hugging Face folder, universal a checkpoint that resumes on any number of ranks, "
        "hf2resume the same of a Hugging Face folder; also the first word after the command",
        choices=("zero2hf", "universal", "hf2resume"),
        since="new",
    )
    ckpt_path: str | None = flag(None, "folder of checkpoints (in PPO its sub-folder _actor or _critic)", "ckpt.path")
    tag: str | None = flag(None, "checkpoint to convert, such as global_step100; the newest if not given", since="new")
    pretrain: str | None = redefault(ModelOptions, "pretrain", None)
    output_path: str | None = flag(None, "folder for the Hugging Face model and its tokenizer (zero2hf)", "output_path")
    is_rm: bool = flag(False, "it is a reward model, or for zero2hf a critic", "is_rm")
    convert_workers: int = flag(1, "processes that convert (universal, hf2resume)", since="new")
    zero_stage: int = flag(2, "ZeRO stage of the training that will resume (hf2resume)", "ds.zero_stage")
    resume_step: int = flag(0, "optimizer steps that count as done: place in the schedule (hf2resume)", since="new")
    consumed_samples: int = flag(0, "rows of the data that count as taken (hf2resume)", since="new")
    verify: bool = redefault(LoraCombinerConfig, "verify", False)


@dataclass(kw_only=True)
class BatchInferenceConfig(LoadOptions, InputOptions, ValueHeadOptions):
    """batch_inference: answers to, or scores of, the rows of a data set."""

    title: ClassVar[str] = "Batch inference"

    eval_task: str | None = flag(
        None,
        "generate_vllm writes responses to prompts, rm the scores of a reward model",
        choices=("generate_vllm", "rm"),
        value_aliases={"generate": "generate_vllm"},
        since="old",
    )
    pretrain: str | None = redefault(ModelOptions, "pretrain", None)
    dataset: str | None = flag(
        None, "sources of prompts, or of prompts with responses (rm), separated by commas", "data.dataset"
    )
    dataset_probs: str | None = redefault(SupervisedDataOptions, "dataset_probs", None)
    dataset_split: str = redefault(SupervisedDataOptions, "dataset_split", "train")
    output_path: str | None = flag(None, "JSON lines file for the result", since="old")
    output_key: str | None = redefault(SFTDataOptions, "output_key", "output")
    label_key: str | None = redefault(PromptDataOptions, "label_key", None)
    apply_chat_template: bool = redefault(DataOptions, "apply_chat_template", False)
    input_template: str | None = redefault(DataOptions, "input_template", None)
    max_len: int = redefault(DataOptions, "max_len", 2048)
    max_samples: int = redefault(DataOptions, "max_samples", 100_000_000)
    prompt_max_len: int = flag(1024, "tokens of a prompt (generate_vllm); see prompt_overlong", since="old")
    prompt_overlong: str = redefault(PromptDataOptions, "prompt_overlong", "cut")
    max_new_tokens: int = flag(1024, "tokens of a response", "rollout.max_new_tokens")
    temperature: float = redefault(SamplingOptions, "temperature", 1.0)
    top_p: float = redefault(SamplingOptions, "top_p", 1.0)
    greedy_sampling: bool = flag(False, "always take the likeliest token", since="old")
    repetition_penalty: float = flag(1.0, "divides the logits of tokens that were there already", since="old")
    best_of_n: int = flag(1, "responses to each prompt", since="old")
    tp_size: int | None = flag(None, "GPUs of the vLLM engine; all of them if not given", since="old")
    max_num_seqs: int = flag(256, "sequences the engine works on at once", since="old")
    enable_prefix_caching: bool = redefault(EngineOptions, "enable_prefix_caching", False)
    micro_batch_size: int = flag(16, "texts scored at once (rm)", since="old")
    iter: int | None = flag(
        None, "take only this slice of the data, counted from 0; each has rollout_batch_size rows", since="old"
    )
    rollout_batch_size: int = flag(2048, "rows of a slice", "rollout.batch_size")
    post_processor: str | None = flag(
        None,
        "made of the scored rows: rs keeps the best response to each prompt, iter_dpo the best with the worst, csft "
        "writes the score into the prompt",
        choices=("rs", "iter_dpo", "csft", "null"),
        since="old",
    )
    normalize_reward: bool = flag(False, "standardize the scores over all rows (csft)", "reward.normalize_enable")
    reward_template: str | None = flag(
        None, "text with {input} and {reward} that becomes the prompt (csft)", since="old"
    )
    enable_csft: bool = flag(False, "append csft_prompt to every prompt (generate_vllm)", since="old")
    csft_prompt: str = flag("<rm_score>: 5.00", "text that asks for a response of this score", since="old")
    seed: int = redefault(DeepSpeedOptions, "seed", 1234)
    full_determinism: bool = redefault(DeepSpeedOptions, "full_determinism", False)
    local_rank: int = redefault(DeepSpeedOptions, "local_rank", -1)
    zero_stage: int = flag(0, "see DeepSpeed", since="old", no_effect="the model runs whole on one device")


@dataclass(kw_only=True)
class RewardTestConfig(InputOptions):
    """reward: try a reward function or server on rows of data, or on rollouts."""

    title: ClassVar[str] = "Reward test"

    task: str | None = flag(
        None,
        "test scores samples and tells of their distribution, latency, failures and worst rows; also the first word "
        "after the command",
        choices=("test",),
        since="new",
    )
    remote_rm_url: str | None = redefault(RewardOptions, "remote_rm_url", None)
    reward_weights: str | None = redefault(RewardOptions, "reward_weights", None)
    load_rollouts: str | None = flag(
        None, "score the samples of this dump of train_ppo_ray (folder or file), instead of a dataset", since="new"
    )
    dataset: str | None = flag(None, "sources of prompts, responses and labels, separated by commas", "data.dataset")
    dataset_split: str = redefault(SupervisedDataOptions, "dataset_split", "train")
    output_key: str | None = flag(
        None, "column with the response; the label itself if not given, which should be rewarded", "data.output_key"
    )
    label_key: str | None = redefault(PromptDataOptions, "label_key", None)
    pretrain: str | None = flag(
        None,
        "model whose tokenizer has the chat template, and the end token that responses have in training",
        "actor.model_name_or_path",
    )
    apply_chat_template: bool = redefault(DataOptions, "apply_chat_template", False)
    input_template: str | None = redefault(DataOptions, "input_template", None)
    max_samples: int = redefault(DataOptions, "max_samples", 64)
    worst_rows: int = flag(5, "samples with the lowest rewards to show", since="new")


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
    "train_kto": Command(
        KTOConfig,
        "Preference optimization from single answers that are labelled good or bad.",
        "--pretrain ./sft --dataset ./labelled.jsonl --input_key question --output_key answer --label_key good \\\n"
        "    --beta 0.1 --train_batch_size 64 --micro_train_batch_size 4 --save_path ./kto",
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
        ServeRMConfig, "Serve a reward model over HTTP.", "--reward_pretrain ./rm --port 5000 --max_len 4096"
    ),
    "lora_combiner": Command(
        LoraCombinerConfig,
        "Merge a LoRA adapter into its base model.",
        "--model_path ./base --lora_path ./adapter --output_path ./merged",
    ),
    "convert": Command(
        ConvertConfig,
        "Convert training checkpoints to Hugging Face folders and back, or for another number of ranks.",
        "--task zero2hf --ckpt_path ./ckpt/checkpoints_sft --pretrain ./model --output_path ./hf --verify",
    ),
    "batch_inference": Command(
        BatchInferenceConfig,
        "Write responses to prompts, or the scores of a reward model, to a file.",
        "--eval_task generate_vllm --pretrain ./sft --dataset ./prompts.jsonl --input_key question \\\n"
        "    --best_of_n 4 --max_new_tokens 512 --output_path ./responses.jsonl",
    ),
    "reward": Command(
        RewardTestConfig,
        "Try a reward function or server: distribution, latency, failures and worst rows.",
        "--task test --remote_rm_url ./reward.py --dataset ./prompts.jsonl --input_key question \\\n"
        "    --output_key answer --label_key answer --max_samples 100",
    ),
}


def nearest_command(word: str, *others: str) -> str | None:
    """The command, or one of the others, that a wrong name was meant to be: one that begins so, or looks like it."""
    names, word = [*COMMANDS, *others], word.replace("-", "_")
    longer = [name for name in names if name.startswith(word)]
    return longer[0] if len(longer) == 1 else next(iter(get_close_matches(word, names, n=1)), None)
