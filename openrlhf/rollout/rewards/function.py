"""Rewards from a Python function in a user's file."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from openrlhf.rollout.errors import RewardError, describe_exception, user_location
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, parse_reply, sample_names
from openrlhf.rollout.rewards.batches import BatchCaller
from openrlhf.rollout.usercode import (
    DeadlinePassed,
    accepts_keyword,
    call_user_code,
    load_user_module,
    name_of,
)

_CONTRACT = (
    "Define `def reward_func(queries, prompts, labels, **kwargs)` that returns "
    '{"rewards": [one number per query], "scores": [...], "extra_logs": {...}}.'
)

_FOREIGN_PARAMETERS = ("data_source", "solution_str", "ground_truth")
_FROM_VERL = (
    "Name it compute_score and write beside it: `def reward_func(queries, prompts, labels, metadata=None): return "
    '[float(compute_score(m.get("datasource", ""), m["response"], label)) for m, label in zip(metadata, labels)]`. '
    'Where it returns a dict, take its "score".'
)


class FunctionReward:
    """Scores samples with `reward_func(queries, prompts, labels)`, sync (in a thread) or async.

    A whole batch goes into one call. A function written for one sample per call is noticed (see `BatchCaller`); from
    then on it gets one sample per call. It must be thread-safe: several calls run at the same time.

    Args:
        function: the function.
        path: the file it came from, for messages.
        timeout: seconds that one call may take.
        max_concurrency: calls that may run at the same time.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        path: str | None = None,
        *,
        timeout: float = 600.0,
        max_concurrency: int = 16,
    ) -> None:
        self._function = function
        self._path = path
        self._timeout = timeout
        self._slots = asyncio.Semaphore(max_concurrency)
        self._wants_metadata = accepts_keyword(function, "metadata")
        self._where = name_of(function, path)
        self._batches = BatchCaller(self._where)

    @classmethod
    def from_file(cls, path: str, module_name: str = "reward_func", **options: Any) -> FunctionReward:
        """Loads `reward_func` from the .py file at `path`, as module `module_name`.

        Raises:
            RewardError: the file is missing or fails to import, or has no such function with three
                parameters.
        """
        module = load_user_module(path, module_name, RewardError)
        function = getattr(module, "reward_func", None)
        if function is None:
            raise RewardError(f"{path} defines no function 'reward_func'. {_CONTRACT}")
        if not callable(function):
            raise RewardError(f"{path}: reward_func is a {type(function).__name__}, not a function. {_CONTRACT}")
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            signature = None  # a builtin without a signature: calling it will tell
        if signature is not None:
            foreign = [parameter for parameter in signature.parameters if parameter in _FOREIGN_PARAMETERS]
            if len(foreign) > 1:  # one alone may be a name that somebody chose
                raise RewardError(
                    f"{path}: reward_func{signature} has the parameters of verl's compute_score "
                    f"({', '.join(foreign)}), which scores one response, and would get lists of queries, prompts and "
                    f"labels. {_FROM_VERL}"
                )
            try:
                signature.bind([], [], [])
            except TypeError as error:
                raise RewardError(
                    f"{path}: reward_func{signature} can't be called with (queries, prompts, labels): {error}. "
                    f"{_CONTRACT}"
                ) from error
        return cls(function, path, **options)

    async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """Returns one result for each request, in order.

        Raises:
            RewardError: the function raised, timed out, or returned something unusable.
        """
        return await self._batches.score(batch, self._call, self._call) if batch else []

    async def close(self) -> None:
        """Nothing to release."""

    async def _call(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        arguments, keywords = self._arguments(batch)
        async with self._slots:
            try:
                reply = await call_user_code(self._function, *arguments, seconds=self._timeout, **keywords)
            except DeadlinePassed as error:
                raise RewardError(
                    f"{self._where} did not return within {self._timeout:g} s for {sample_names(batch)}.",
                    isolatable=False,
                ) from error
            except Exception as error:
                raise RewardError(
                    f"{self._where} raised {describe_exception(error)} at "
                    f"{user_location(error, self._path)} for {sample_names(batch)}.",
                    isolatable=True,
                ) from error
        return self._results(reply, batch)

    def _arguments(self, batch: Sequence[RewardRequest]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the function is called with."""
        lists = ([r.query for r in batch], [r.prompt for r in batch], [r.label for r in batch])
        return lists, {"metadata": [dict(r.metadata) for r in batch]} if self._wants_metadata else {}

    def _results(self, reply: Any, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """Its answer, checked."""
        return parse_reply(reply, batch, self._where)
