"""Reinforcement learning from human feedback for language models, with Ray, DeepSpeed and vLLM."""

from openrlhf.utils import former_names

__version__ = "0.1.0"

former_names.install()
