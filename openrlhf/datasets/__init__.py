"""Data: sources and mixing, rows into token ids and masks, and an order that survives a restart."""

from openrlhf.datasets.order import ResumableOrder, epoch_permutation
from openrlhf.datasets.preference import PreferenceDataset, build_preference_dataset
from openrlhf.datasets.prompts import PromptRow, build_prompts, load_prompts
from openrlhf.datasets.sft import SFTDataset, build_sft_dataset
from openrlhf.datasets.sources import DataError, load_rows, require_columns
from openrlhf.datasets.unpaired import UnpairedDataset, build_unpaired_dataset

__all__ = [
    "DataError",
    "PreferenceDataset",
    "PromptRow",
    "ResumableOrder",
    "SFTDataset",
    "UnpairedDataset",
    "build_preference_dataset",
    "build_prompts",
    "build_sft_dataset",
    "build_unpaired_dataset",
    "epoch_permutation",
    "load_prompts",
    "load_rows",
    "require_columns",
]
