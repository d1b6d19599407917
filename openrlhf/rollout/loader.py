"""Loading the agent file that `--agent_func_path` names."""

from __future__ import annotations

import inspect

from openrlhf.rollout.agents import AgentExecutorBase
from openrlhf.rollout.errors import AgentError, describe_exception, user_location
from openrlhf.rollout.usercode import accepts_keyword, load_user_module

_ARGUMENTS = ("prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine")
_CONTRACT = (
    "Define `class AgentExecutor(MultiTurnAgentExecutor)` (or AgentExecutorBase), imported from "
    "openrlhf.utils.agent, constructible without arguments."
)


def load_agent_executor(path: str) -> AgentExecutorBase:
    """Runs the agent file and returns an instance of its `AgentExecutor`.

    Raises:
        AgentError: no such file, it fails to import, or its class breaks the contract; the message says how.
    """
    module = load_user_module(path, "agent_module", AgentError)
    cls = getattr(module, "AgentExecutor", None)
    if cls is None:
        old = callable(getattr(module, "step", None))
        hint = " A module-level step() is the interface of releases before 0.9.1." if old else ""
        raise AgentError(f"{path} defines no class AgentExecutor.{hint} {_CONTRACT}")
    if not inspect.isclass(cls) or not issubclass(cls, AgentExecutorBase):
        raise AgentError(f"{path}: AgentExecutor is not a subclass of AgentExecutorBase. {_CONTRACT}")
    if inspect.iscoroutinefunction(cls.__init__):
        raise AgentError(
            f"{path}: AgentExecutor has an `async def __init__`, which Python can't call. Write `def "
            "__init__` and move what is awaited to execute()."
        )
    if inspect.isabstract(cls):
        raise AgentError(f"{path}: AgentExecutor lacks {sorted(cls.__abstractmethods__)}. {_CONTRACT}")
    if not inspect.iscoroutinefunction(cls.execute):
        raise AgentError(f"{path}: AgentExecutor.execute must be `async def`")
    try:
        more = ("images",) if accepts_keyword(cls.execute, "images") else ()
        inspect.signature(cls.execute).bind(None, **dict.fromkeys(_ARGUMENTS + more))
    except TypeError as error:
        raise AgentError(
            f"{path}: AgentExecutor.execute{inspect.signature(cls.execute)} can't be called with the "
            f"keywords {', '.join(_ARGUMENTS)}: {error}"
        ) from error
    try:
        return cls()
    except (Exception, SystemExit) as error:
        raise AgentError(
            f"{path}: AgentExecutor() raised {describe_exception(error)} at "
            f"{user_location(error, module.__file__)}. {_CONTRACT}"
        ) from error
