"""Option groups that say which data is read and how rows become text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from openrlhf.config.flag import OptionGroup, flag


@dataclass(kw_only=True)
class DataOptions(OptionGroup):
    title: ClassVar[str] = "Data"

    eval_dataset: str | None = flag(
        None,
        "sources to evaluate on, separated by commas and never mixed by probability; in PPO name=source gives a set a "
        "name in the metrics",
        "eval.dataset",
    )
    eval_split: str = flag("train", "split of each evaluation source", "eval.split")
    eval_steps: int = flag(-1, "evaluate every N global steps; -1 means once an epoch, and never in PPO", "eval.steps")
    max_samples: int = flag(1_000_000, "largest number of rows, of each source and of all together", "data.max_samples")
    max_len: int = flag(2048, "largest number of tokens of a sample", "data.max_len")
    input_template: str | None = flag(
        None,
        "text with one {}, the place of the prompt; other braces are text; not used together with a chat template",
        "data.input_template",
    )
    apply_chat_template: bool = flag(
        False, "format rows with the tokenizer's chat template", "data.apply_chat_template"
    )
    dataloader_num_workers: int = flag(
        0,
        "further processes that turn rows into ids before the first step; with 0, train_sft does that step by step if "
        "there are more than a million rows",
        "data.dataloader_num_workers",
    )


@dataclass(kw_only=True)
class InputOptions(OptionGroup):
    title: ClassVar[str] = "Data"

    input_key: str = flag("input", "column with the prompt, or with the list of messages", "data.input_key")


@dataclass(kw_only=True)
class SupervisedDataOptions(DataOptions):
    dataset: str | None = flag(
        None,
        "sources to train on, separated by commas: files, folders, hub ids, each with @data_dir if needed",
        "data.dataset",
    )
    dataset_probs: str | None = flag(
        None, "sampling probabilities, one for each source, separated by commas", "data.dataset_probs"
    )
    dataset_split: str = flag("train", "split of each training source", "data.dataset_split")
    tokenizer_chat_template: str | None = flag(
        None,
        "file with a Jinja template, or the template itself, that replaces the tokenizer's chat template",
        "data.tokenizer_chat_template",
    )


@dataclass(kw_only=True)
class SFTDataOptions(SupervisedDataOptions, InputOptions):
    output_key: str | None = flag(None, "column with the response", "data.output_key")
    multiturn: bool = flag(False, "train on every assistant turn of a conversation", "data.multiturn")
    pretrain_mode: bool = flag(
        False,
        "continue pre-training: loss on every token, no template, no end token added",
        "model.pretrain_mode_enable",
        "actor.pretrain_mode_enable",
    )
    train_split: str = flag("train", "see dataset_split", no_effect="the split is chosen with --dataset_split")


@dataclass(kw_only=True)
class PreferenceDataOptions(SupervisedDataOptions):
    prompt_key: str | None = flag(
        None, "column with the prompt; without it the answers are whole texts", "data.prompt_key"
    )
    chosen_key: str = flag("chosen", "column with the better answer", "data.chosen_key")
    rejected_key: str = flag("rejected", "column with the worse answer", "data.rejected_key")


@dataclass(kw_only=True)
class PromptDataOptions(DataOptions, InputOptions):
    prompt_data: str | None = flag(
        None,
        "sources of prompts, separated by commas: files, folders, hub ids, each with @data_dir if needed",
        "data.prompt_dataset",
    )
    prompt_data_probs: str | None = flag(
        None, "sampling probabilities, one for each source, separated by commas", "data.prompt_probs"
    )
    prompt_split: str = flag("train", "split of each prompt source", "data.prompt_split")
    label_key: str | None = flag(
        None, "column that rewards and agents get as the label; an empty text if not given", "data.label_key"
    )
    metadata_key: str | None = flag(
        None,
        "column with a dict of facts for rewards, hooks, dumps and metrics, besides the other columns",
        since="new",
    )
    tool_key: str | None = flag(
        None, "column with a prompt's tools for the chat template: a list, or its JSON text", since="new"
    )
    prompt_max_len: int | None = flag(
        None, "tokens of a prompt; what max_len leaves beside the response if not given", since="old"
    )
    prompt_overlong: str = flag(
        "cut",
        "what happens to longer prompts: cut keeps their end, drop leaves the row out; both are counted",
        choices=("cut", "drop"),
        since="new",
    )
    image_key: str = flag("images", "column with the images of a prompt", "data.image_key", since="0.11")
    max_images_per_prompt: int = flag(
        0, "most images in a prompt; 0 trains on text only", "data.max_images_per_prompt", since="0.11"
    )
