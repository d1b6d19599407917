"""Classes that agent files import: ``from openrlhf.utils.agent import MultiTurnAgentExecutor``."""

from openrlhf.rollout.agents import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from openrlhf.rollout.openai_agent import OpenAIAgentExecutor

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "MultiTurnAgentExecutor",
    "OpenAIAgentExecutor",
    "SingleTurnAgentExecutor",
]
