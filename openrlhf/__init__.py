"""Reinforcement learning from human feedback for language models, with Ray, DeepSpeed and vLLM."""

__version__ = "0.1.0"
