"""Models for inference in one process: what loading needs beside the flags that a small command has."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import nn

from openrlhf.config.options_model import EngineModelOptions, LoadOptions
from openrlhf.models.folder import read_config
from openrlhf.models.loading import DTYPES, load_causal_lm, load_sequence_regression

DEFAULT_HEAD = "score"


@dataclass(kw_only=True)
class LoadSettings(EngineModelOptions):
    """The flags that decide how a model is loaded, and how an engine runs it; those of training are off."""

    param_dtype: str = "fp32"
    zero_stage: int = 0
    seed: int = 0

    @classmethod
    def of(cls, cfg: LoadOptions) -> LoadSettings:
        """As the flags of a command say that has those of loading only."""
        return cls(**{field.name: getattr(cfg, field.name) for field in fields(LoadOptions)})


def load_for_inference(
    path: str, settings: LoadSettings, *, is_rm: bool, head_prefix: str = DEFAULT_HEAD, init_head: bool = False
) -> nn.Module:
    """A causal language model, or with ``is_rm`` a transformer with a scalar head, without gradients.

    Args:
        init_head: draw the head anew, so that the folder may have none.

    Raises:
        ModelLoadError: the model can't be read.
    """
    if is_rm:
        return load_sequence_regression(path, settings, head_prefix=head_prefix, init_head=init_head, trainable=False)
    return load_causal_lm(path, settings, trainable=False)


def use_modelscope() -> None:
    """Make transformers download what is not local from ModelScope (``--use_ms``)."""
    from modelscope.utils.hf_util import patch_hub

    patch_hub()


def stored_dtype(path: str, default: str) -> str:
    """The number format (as a ``--param_dtype``) that a local model folder says its weights have."""
    config = read_config(path)
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    by_torch_name = {str(dtype).removeprefix("torch."): flag for flag, dtype in DTYPES.items()}
    return by_torch_name.get(name, default)
