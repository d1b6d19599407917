"""Configuration: every flag is declared once, and command line, YAML, Hydra, help and docs follow from it."""

from openrlhf.config.commands import (
    COMMANDS,
    BatchInferenceConfig,
    ConvertConfig,
    DPOConfig,
    KTOConfig,
    LoraCombinerConfig,
    PPOConfig,
    RewardTestConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
)
from openrlhf.config.options_model import CheckpointOptions, LoggingOptions
from openrlhf.config.parser import build, from_hydra, from_mapping, parse, parse_cli, register_configs
from openrlhf.config.problems import ConfigError

__all__ = [
    "COMMANDS",
    "BatchInferenceConfig",
    "CheckpointOptions",
    "ConfigError",
    "ConvertConfig",
    "DPOConfig",
    "KTOConfig",
    "LoggingOptions",
    "LoraCombinerConfig",
    "PPOConfig",
    "RMConfig",
    "RewardTestConfig",
    "SFTConfig",
    "ServeRMConfig",
    "build",
    "from_hydra",
    "from_mapping",
    "parse",
    "parse_cli",
    "register_configs",
]
