"""Every rule that a configuration must keep. They are checked before anything is started or imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openrlhf.config.commands import (
    BatchInferenceConfig,
    ConvertConfig,
    KTOConfig,
    LoraCombinerConfig,
    PPOConfig,
    RewardTestConfig,
    RMConfig,
    ServeRMConfig,
    SupervisedOptions,
    TrainerOptions,
)
from openrlhf.config.datasource import check_source, check_split, looks_local, parse_probabilities, parse_sources
from openrlhf.config.derive import data_copies
from openrlhf.config.flag import flag_specs, flag_value
from openrlhf.config.heads import describe_heads, fitting_sizes, heads_of_folder
from openrlhf.config.limits import check_limits
from openrlhf.config.options_data import SupervisedDataOptions
from openrlhf.config.options_model import DeepSpeedOptions, LoadOptions, ModelOptions
from openrlhf.config.problems import Violation, not_there, refused
from openrlhf.config.rules_ppo import (
    check_division,
    check_ppo,
    check_reward_sources,
    check_second_copies,
    nearest_multiples,
)
from openrlhf.config.values import show_value

# Without these being sound numbers, the arithmetic of batches means nothing.
BATCH_FLAGS = {"train_batch_size", "micro_train_batch_size", "ring_attn_size", "ds_tensor_parallel_size"}


TRAINING_MODELS = ("pretrain", "reward_pretrain", "critic_pretrain", "ref_pretrain")


def validate(cfg: Any, explicit: frozenset[str], world_size: int) -> list[Violation]:
    """All rules that a (normalized) configuration breaks.

    Args:
        cfg: its configuration, after `normalize`.
        explicit: the flags that someone gave a value.
        world_size: ranks of the job, for the commands that a launcher starts once a rank.
    """
    violations = [violation for kind, check in CHECKS if isinstance(cfg, kind) for violation in check(cfg)]
    if isinstance(cfg, SupervisedOptions) and not BATCH_FLAGS & {violation.flag for violation in violations}:
        violations += _check_supervised_batches(cfg, world_size)
    if isinstance(cfg, PPOConfig):
        # The arithmetic rules would only repeat, in other words, that a number is out of range.
        broken = {violation.flag for violation in violations}
        violations += [v for v in check_ppo(cfg, explicit, broken) if v.flag not in broken]
    wrong = {violation.flag for violation in check_limits(cfg)}
    violations += [violation for violation in _check_pairs(cfg) if violation.flag not in wrong]
    return violations


# What a command can't do without: config class, flag, and what to give.
REQUIRED: tuple[tuple[type, str, str], ...] = (
    (ModelOptions, "pretrain", "a model to start from: a local folder or a hub id"),
    (SupervisedDataOptions, "dataset", "data to train on: a file, a folder or a hub id"),
    (PPOConfig, "prompt_data", "prompts to train on: a file, a folder or a hub id"),
    (ServeRMConfig, "reward_pretrain", "the reward model to serve: a local folder or a hub id"),
    (LoraCombinerConfig, "model_path", "the base model: a local folder or a hub id"),
    (LoraCombinerConfig, "lora_path", "the folder of the adapter"),
    (LoraCombinerConfig, "output_path", "a folder for the result"),
    (ConvertConfig, "task", "zero2hf, universal or hf2resume"),
    (ConvertConfig, "ckpt_path", "the folder of the checkpoints"),
    (BatchInferenceConfig, "eval_task", "generate_vllm or rm"),
    (BatchInferenceConfig, "pretrain", "the model: a local folder or a hub id"),
    (BatchInferenceConfig, "dataset", "data: a file, a folder or a hub id"),
    (BatchInferenceConfig, "output_path", "a file for the result"),
    (RewardTestConfig, "task", "test"),
    (RewardTestConfig, "remote_rm_url", "a .py file that defines reward_func, or URLs"),
)
REQUIRED_BY_TASK: dict[str | None, dict[str, str]] = {
    "hf2resume": {"pretrain": "the Hugging Face folder that has the weights"},
    "zero2hf": {
        "pretrain": "the model that the run started from: it has the configuration and the tokenizer",
        "output_path": "a folder for the result",
    },
}


def _check_required(cfg: Any) -> Iterator[Violation]:
    needed = {flag: what for kind, flag, what in REQUIRED if isinstance(cfg, kind)}
    if isinstance(cfg, ConvertConfig):
        needed |= REQUIRED_BY_TASK.get(cfg.task, {})
    for flag, what in needed.items():
        if not getattr(cfg, flag):
            yield Violation(flag, "is missing", f"give {what}")


# Flags that do nothing without another one: flag, the other, why.
NEEDS = (
    ("partial_rollout", "async_train", "belongs to asynchronous training"),
    ("group_rm", "custom_rm_path", "is about the function of --custom_rm_path, which is not given"),
    ("tool_key", "apply_chat_template", "tools are shown by a chat template"),
    ("multiturn", "apply_chat_template", "needs the chat template to find the assistant's turns"),
    ("rollout_only", "dump_rollouts", "writes rollouts, but nowhere"),
    ("image_key", "max_images_per_prompt", "is not read without images"),
    ("ring_attn_size", "packing_samples", "works on packed samples only"),
    ("gradient_checkpointing_every", "gradient_checkpointing", "says which layers are recomputed, and none are"),
)
# Flags that don't go together: flag, the other, why.
CONFLICTS = (
    ("custom_generate_function_path", "agent_func_path", "both play the episodes"),
    ("dynamic_sampling_filter_path", "dynamic_filtering", "both decide on groups"),
    ("vllm_enable_sleep", "async_train", "engines can't sleep while they are kept generating"),
    ("rollout_only", "load_rollouts", "nothing is generated where rollouts are loaded"),
    ("rollout_only", "load_checkpoint", "there is no model to train"),
    ("rollout_only", "async_train", "there is no model to train"),
    ("load_rollouts", "async_train", "there is nothing to generate while it trains"),
    ("label_smoothing", "ipo", "the loss of IPO has none"),
    ("pretrain_mode", "multiturn", "it trains on every token, so there are no turns to choose"),
    ("load_in_4bit", "use_ds_universal_ckpt", "checkpoints hold no 4-bit weights, which that format would need"),
    ("reward_pretrain", "max_images_per_prompt", "reward models don't see images"),
    ("use_liger_kernel", "max_images_per_prompt", "there are no Liger kernels of vision models"),
    ("ring_attn_size", "max_images_per_prompt", "ranks can't share a sequence that has images"),
    *(
        ("ds_tensor_parallel_size", other, "ranks that share layers don't work with it")
        for other in ("ring_attn_size", "lora_rank", "load_in_4bit", "use_ds_universal_ckpt", "zpg")
    ),
)


def _check_pairs(cfg: Any) -> Iterator[Violation]:
    used = {
        name for name, spec in flag_specs(type(cfg)).items() if getattr(cfg, name) not in (spec.default, None, 0, "")
    }
    for flag, other, why in NEEDS:
        if flag in used and not flag_value(cfg, other):
            yield Violation(flag, why, f"add --{other}, or leave --{flag} out")
    for flag, other, why in CONFLICTS:
        if flag in used and other in used:
            yield Violation(flag, f"does not go with --{other}: {why}", f"leave out --{flag} or --{other}")


def _check_conversion(cfg: ConvertConfig) -> Iterator[Violation]:
    if cfg.task == "hf2resume":
        if cfg.zero_stage == 0 and cfg.param_dtype == "fp32":
            problem = "0 with fp32 keeps no optimizer files, so no checkpoint can be made for any number of ranks"
            yield Violation("zero_stage", problem, "use 1, 2 or 3, also in the training")
        if cfg.param_dtype == "fp16":
            yield Violation("param_dtype", "hf2resume works on the CPU, which does not train in fp16", "use bf16")
    elif cfg.ckpt_path and not Path(cfg.ckpt_path).is_dir():
        yield not_there("ckpt_path", f"folder {cfg.ckpt_path}")
    if cfg.ckpt_path:
        yield from _check_pattern(cfg.ckpt_path)


def _check_reward_test(cfg: RewardTestConfig) -> Iterator[Violation]:
    if cfg.remote_rm_url:
        yield from check_reward_sources(cfg.remote_rm_url, cfg.reward_weights)
    if bool(cfg.dataset) == bool(cfg.load_rollouts):
        yield Violation("dataset", "one source of samples is needed", "give either --dataset or --load_rollouts")
    elif cfg.dataset and not (cfg.output_key or cfg.label_key):
        yield Violation(
            "output_key", "is missing", "name the column with the responses, or with --label_key the labels"
        )
    if cfg.apply_chat_template and not cfg.pretrain:
        yield Violation("pretrain", "is missing: the chat template is a tokenizer's", "name the model")


def _check_batch_inference(cfg: BatchInferenceConfig) -> Iterator[Violation]:
    if cfg.output_path and Path(cfg.output_path).is_dir():
        yield Violation("output_path", f"{cfg.output_path} is a folder", "name a file, for example out.jsonl")
    if cfg.eval_task == "rm" and not cfg.output_key:
        yield Violation("output_key", "is missing", "name the column with the responses")
    processed = cfg.post_processor not in (None, "null")
    if processed and cfg.eval_task == "generate_vllm":
        problem = f"{cfg.post_processor} works on scores, and generate_vllm makes none"
        yield Violation("post_processor", problem, "leave it out here, and use it in a second run with --eval_task rm")
    if cfg.reward_template is not None:
        missing = [part for part in ("{input}", "{reward}") if part not in cfg.reward_template]
        if missing:
            yield Violation("reward_template", f"has no {' and no '.join(missing)}", "put it in")
        elif cfg.post_processor != "csft":
            yield Violation("reward_template", "is only used by csft", "add --post_processor csft, or leave it out")
    if cfg.normalize_reward and cfg.post_processor != "csft":
        yield Violation("normalize_reward", "is only used by csft", "add --post_processor csft, or leave it out")
    if cfg.enable_csft and cfg.eval_task == "rm":
        yield Violation("enable_csft", "belongs to generating", "leave it out with --eval_task rm")


def _check_paths(cfg: Any) -> Iterator[Violation]:
    for flag in (*TRAINING_MODELS, "model_path", "lora_path"):
        path = flag_value(cfg, flag)
        if path and looks_local(path) and not Path(path).is_dir():
            # The critic and the reference model are filled in from these two; say it once.
            if flag in ("critic_pretrain", "ref_pretrain") and path in (
                cfg.pretrain,
                flag_value(cfg, "reward_pretrain"),
            ):
                continue
            yield not_there(flag, f"folder {path}")
    dump = flag_value(cfg, "load_rollouts")
    if dump and not Path(dump).exists():
        yield not_there("load_rollouts", dump)


# What a flag needs beyond the requirements: flag, the value (None: any), package, module.
OPTIONAL_PACKAGES = (
    ("load_in_4bit", None, "bitsandbytes", "bitsandbytes"),
    ("experts_implementation", "deepgemm", "kernels", "kernels"),
    ("use_ms", None, "modelscope", "modelscope"),
    ("use_liger_kernel", None, "liger-kernel", "liger_kernel"),
    ("use_tensorboard", None, "tensorboard", "tensorboard"),
    ("use_wandb", None, "wandb", "wandb"),
)


def _check_packages(cfg: Any) -> Iterator[Violation]:
    for flag, needs, package, module in OPTIONAL_PACKAGES:
        value = flag_value(cfg, flag)
        if value and needs in (None, value) and importlib.util.find_spec(module) is None:
            with_value = f"{value} needs" if needs else "needs"
            problem = f"{with_value} the package {package}, which isn't installed"
            yield Violation(flag, problem, f"pip install {package}, or leave the flag out")


def _check_loading(cfg: LoadOptions) -> Iterator[Violation]:
    if cfg.load_in_4bit and cfg.param_dtype != "bf16":
        yield Violation(
            "load_in_4bit", f"computes in bf16, but --param_dtype is {cfg.param_dtype}", "use --param_dtype bf16"
        )
    if cfg.load_in_4bit and isinstance(cfg, ModelOptions) and cfg.lora_rank == 0:
        yield Violation("load_in_4bit", "4-bit weights can't be trained, but adapters on them can", "add --lora_rank")
    reentrant = flag_value(cfg, "gradient_checkpointing") and flag_value(cfg, "gradient_checkpointing_use_reentrant")
    if reentrant and flag_value(cfg, "aux_loss_coef"):
        problem = "has no effect with --gradient_checkpointing_use_reentrant, which keeps no gradient of the routers"
        yield Violation("aux_loss_coef", problem, "leave out --gradient_checkpointing_use_reentrant")
    if isinstance(cfg, RMConfig) and cfg.use_liger_kernel:
        yield Violation("use_liger_kernel", "has no kernels for reward models", "leave it out")


def _check_precision(cfg: DeepSpeedOptions) -> Iterator[Violation]:
    if cfg.ds_tensor_parallel_size > 1:
        refused = {
            "param_dtype": cfg.param_dtype == "fp16",
            "optim": "muon" in (flag_value(cfg, "optim"), flag_value(cfg, "critic_optim")),
        }
        for flag in (flag for flag, asked in refused.items() if asked):
            value = show_value(getattr(cfg, flag))
            problem = f"ranks that share layers don't work with --{flag} {value}"
            yield Violation("ds_tensor_parallel_size", problem, f"use 1, or leave --{flag} out")
    if cfg.zpg > 1 and cfg.zero_stage != 3:
        yield Violation("zpg", f"belongs to ZeRO-3, but --zero_stage is {cfg.zero_stage}", "use --zero_stage 3")
    muon = next((flag for flag in ("optim", "critic_optim") if flag_value(cfg, flag) == "muon"), None)
    if muon is not None and flag_value(cfg, "adam_offload"):
        problem = "muon multiplies matrices, which takes too long on the CPU, where --adam_offload updates the weights"
        yield Violation(muon, problem, "leave out --adam_offload, or use adam")
    if muon is not None and cfg.use_ds_universal_ckpt:
        problem = "muon has no second moments, which DeepSpeed's universal format needs"
        yield Violation(muon, problem, "leave out --use_ds_universal_ckpt, or use adam")


def _check_heads(cfg: DeepSpeedOptions) -> Iterator[Violation]:
    paths = (flag_value(cfg, f) for f in TRAINING_MODELS)
    for path in dict.fromkeys(path for path in paths if path):
        heads = heads_of_folder(path)
        if heads is None:
            continue
        for flag in ("ring_attn_size", "ds_tensor_parallel_size"):
            size, sizes = getattr(cfg, flag), fitting_sizes(*heads, shared=flag == "ring_attn_size")
            if size > 1 and size not in sizes:
                yield Violation(flag, f"{path} {describe_heads(*heads, size)}", f"use one of {str(sizes)[1:-1]}")


# Flags of data: sources, split, probabilities.
DATA_FLAGS = (
    ("prompt_data", "prompt_split", "prompt_data_probs"),
    ("dataset", "dataset_split", "dataset_probs"),
    ("eval_dataset", "eval_split", ""),
)


def _check_data(cfg: Any) -> Iterator[Violation]:
    template = getattr(cfg, "input_template", None) or ""
    if (places := template.count("{}")) > 1:
        yield Violation("input_template", f"{template!r} has {places} times {{}}", "write it once, for the prompt")
    for flag, split_flag, probs_flag in DATA_FLAGS:
        text, split, probs = (flag_value(cfg, name) for name in (flag, split_flag, probs_flag))
        sources = parse_sources(text) if text else []
        names = [source.name for source in sources if source.name is not None]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield Violation(flag, f"two sources are called {name}", "give each a name of its own")
        for source in sources:
            yield from refused(flag, check_source, source)
        if split is not None:
            yield from refused(split_flag, check_split, split, sources)
        if sources and probs:
            yield from refused(probs_flag, parse_probabilities, probs, len(sources))


def _check_folders(cfg: TrainerOptions) -> Iterator[Violation]:
    for flag in ("save_path", "ckpt_path", "run_dir", "dump_rollouts"):
        if not getattr(cfg, flag, None):
            continue
        folder = Path(getattr(cfg, flag)).absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            yield Violation(flag, f"{existing} is a file, not a folder", "choose another folder")
        elif not os.access(existing, os.W_OK | os.X_OK):
            yield Violation(flag, f"{existing} can't be written to", "choose another folder, or mend its rights")
    writes = cfg.save_steps > 0 or (isinstance(cfg, PPOConfig) and cfg.eval_dataset)  # the best one
    if cfg.load_checkpoint or (writes and not cfg.disable_ds_ckpt):
        yield from _check_pattern(cfg.ckpt_path)
    if cfg.disable_ds_ckpt and not cfg.save_hf_ckpt and cfg.save_steps > 0:
        yield Violation(
            "disable_ds_ckpt",
            f"leaves nothing to write every {cfg.save_steps} steps",
            "add --save_hf_ckpt, or leave out --save_steps",
        )


def _check_pattern(ckpt_path: str) -> Iterator[Violation]:
    """What is written there could not be read again."""
    path = str(Path(ckpt_path).absolute())
    if found := [mark for mark in "[*?" if mark in path]:
        problem = f"{path} has {' and '.join(found)}: DeepSpeed takes such paths for patterns when it reads checkpoints"
        yield Violation("ckpt_path", problem, "choose a folder without, or rename it")


def _check_adapter_folders(cfg: TrainerOptions) -> Iterator[Violation]:
    """A folder into which a model is saved keeps no weights of an earlier one; adapters still need those of theirs."""
    if cfg.lora_rank == 0:
        return
    ends = ("", "_critic") if flag_value(cfg, "save_value_network") else ("",)
    saved = {Path(cfg.save_path + end).resolve() for end in ends}
    folders = {flag: Path(path).resolve() for flag in TRAINING_MODELS if (path := flag_value(cfg, flag))}
    for flag, folder in folders.items():
        lost = f"the folder of --{flag}, whose weights would give way to the adapter's"
        if folder in saved:
            yield Violation("save_path", f"{folder} is {lost}", "choose another folder")
            return
        if cfg.save_hf_ckpt and folder.parent == Path(cfg.ckpt_path).resolve() and folder.name.endswith("_hf"):
            yield Violation("ckpt_path", f"--save_hf_ckpt writes into {folder}, {lost}", "choose another folder")
            return


def _check_supervised(cfg: SupervisedOptions) -> Iterator[Violation]:
    if isinstance(cfg, RMConfig) and cfg.margin_loss and cfg.loss != "sigmoid":
        fix = "use --loss sigmoid, which without a margin is the same as logexp"
        yield Violation("margin_loss", f"--loss {cfg.loss} has no margin", fix)
    if isinstance(cfg, KTOConfig):
        if cfg.train_batch_size == 1:
            problem = "is 1: each prompt is paired with the answer of another row of the batch to estimate the KL"
            yield Violation("train_batch_size", problem, "use 2 or more")
        if not (cfg.output_key or cfg.apply_chat_template):
            problem = "is missing, and without a chat template the answer has no other place"
            yield Violation("output_key", problem, "name the column with the answer")


def _check_supervised_batches(cfg: SupervisedOptions, world_size: int) -> Iterator[Violation]:
    model_size = data_copies(cfg)
    if world_size % model_size:
        yield Violation(
            "ring_attn_size",
            f"{world_size} ranks don't divide into groups of ring_attn_size x ds_tensor_parallel_size = {model_size}",
            f"start {' or '.join(map(str, nearest_multiples(world_size, model_size)))} ranks",
        )
        return
    yield from check_division(cfg.train_batch_size, cfg.micro_train_batch_size, world_size // model_size)
    yield from check_second_copies(cfg, world_size)


# Rules of one configuration alone, by the class that they are about.
CHECKS: tuple[tuple[type, Callable[[Any], Iterator[Violation]]], ...] = (
    *((object, check) for check in (check_limits, _check_required, _check_paths, _check_packages)),
    (object, _check_data),
    (LoadOptions, _check_loading),
    (DeepSpeedOptions, _check_precision),
    (DeepSpeedOptions, _check_heads),
    (TrainerOptions, _check_folders),
    (TrainerOptions, _check_adapter_folders),
    (ConvertConfig, _check_conversion),
    (BatchInferenceConfig, _check_batch_inference),
    (RewardTestConfig, _check_reward_test),
    (SupervisedOptions, _check_supervised),
)
