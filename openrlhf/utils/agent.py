"""Classes that users' files import: ``from openrlhf.utils.agent import MultiTurnAgentExecutor``."""

from openrlhf.rollout.agents import (
    AgentExecutorBase,
    AgentInstanceBase,
    MultiTurnAgentExecutor,
    SingleTurnAgentExecutor,
)
from openrlhf.rollout.openai_agent import OpenAIAgentExecutor
from openrlhf.rollout.sample import DynamicFilterOutput, Sample

__all__ = [
    "AgentExecutorBase",
    "AgentInstanceBase",
    "DynamicFilterOutput",
    "MultiTurnAgentExecutor",
    "OpenAIAgentExecutor",
    "Sample",
    "SingleTurnAgentExecutor",
]

# As in a package, an import of a name that isn't here is asked of the finders: see former_names.
__path__: list[str] = []
