"""Classes that agent files import: ``from openrlhf.utils.agent import MultiTurnAgentExecutor``."""

from openrlhf.rollout.agents import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)

__all__ = ["AgentExecutorBase", "AgentInstanceBase", "MultiTurnAgentExecutor", "SingleTurnAgentExecutor"]
