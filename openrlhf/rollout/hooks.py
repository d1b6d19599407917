"""The functions that users plug into a rollout: found and checked at the start, called with a deadline.

A hook is named ``path/to/file.py:function`` or ``package.module.function``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import itertools
import logging
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from openrlhf.rollout.agents import AgentExecutorBase
from openrlhf.rollout.buffer import SELECTIONS, Selection, checked_selection, oldest_first
from openrlhf.rollout.errors import AgentError, RewardError, RolloutError, describe_exception, user_location
from openrlhf.rollout.group import Group
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, parse_reply
from openrlhf.rollout.rewards.batches import BatchCaller
from openrlhf.rollout.rewards.function import FunctionReward
from openrlhf.rollout.sample import DynamicFilterOutput, Sample, SampleStatus, split_reward
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.rollout.usercode import (
    DeadlinePassed,
    accepts_keyword,
    call_user_code,
    is_async,
    load_user_module,
    name_of,
    source_of,
)

logger = logging.getLogger(__name__)

Hook = Callable[..., Any]

CONTRACTS = {
    "custom_generate_function_path": ("async def generate(args, sample, sampling_params, *, llm_engine) -> Sample", 3),
    "custom_rm_path": ("def rm(args, sample) -> float | dict", 2),
    "group_rm": ("def rm(args, samples) -> list[float | dict]", 2),
    "dynamic_sampling_filter_path": ("def keep(args, samples) -> bool | DynamicFilterOutput", 2),
    "buffer_filter_path": ("def select(args, groups, count) -> list[int]", 3),
}
"""Wanted signature by flag, and how many of its arguments are positional."""

GENERATE_KEYWORDS = ("evaluation", "llm_engine", "hf_tokenizer", "max_length", "images")
"""What a generate function gets besides, if it names it."""


_FILTER_SECONDS = 600.0


class HookError(RolloutError):
    """A hook can't be found, or can't be called as it has to be; the message has the signature wanted."""


def load_hook(flag: str, path: str, contract: str | None = None) -> Hook:
    """Finds the function that a flag names, and checks that it can be called as the flag's hook.

    Args:
        flag: name of the flag, without dashes.
        path: its value.
        contract: key of `CONTRACTS`, if it is not the flag.

    Raises:
        HookError: see the class.
    """
    wanted, positional = CONTRACTS[contract or flag]
    where = f"--{flag} {path}"
    file, colon, name = path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not name.isidentifier() or (not colon and name == "py"):
        raise HookError(f"{where}: write path/to/file.py:function or package.module.function. Wanted: {wanted}")
    module = _user_file(os.path.abspath(os.path.expanduser(file))) if colon else _user_package(file, where)
    function = getattr(module, name, None)
    if not callable(function):
        problem = f"there is no {name} in {file}" if function is None else f"{name} in {file} is no function"
        raise HookError(f"{where}: {problem}. Wanted: {wanted}")
    keywords = GENERATE_KEYWORDS if flag == "custom_generate_function_path" else ()
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * positional, **{key: None for key in keywords if accepts_keyword(function, key)})
    except (TypeError, ValueError) as error:
        raise HookError(f"{where}: {name_of(function)} can't be called: {error}. Wanted: {wanted}") from error
    if keywords and not is_async(function):
        raise HookError(f"{where}: {name_of(function)} must be `async def`. Wanted: {wanted}")
    return function


@functools.cache
def _user_file(path: str) -> ModuleType:
    """The module of a file, run once in each process however many hooks it has."""
    stem = os.path.basename(path).removesuffix(".py")
    return load_user_module(path, f"hooks_{zlib.crc32(path.encode()):x}_{stem}", HookError)


def _user_package(name: str, where: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        place = user_location(error, None)
        raise HookError(f"{where}: {name} can't be imported: {describe_exception(error)} (at {place})") from error


# --- generate ---------------------------------------------------------------------------------------------------------


class GenerateFunction(AgentExecutorBase):
    """Plays an episode with ``generate(args, sample, sampling_params)``; parts of one rollout come as a list.

    Args:
        function: the hook.
        args: configuration of the run.

    Attributes:
        title: the function, for messages.
        source: the user's file.
    """

    def __init__(self, function: Hook, args: Any) -> None:
        self._function = function
        self._args = args
        self.title = name_of(function)
        self.source = source_of(function)

    async def execute(  # type: ignore[override]
        self, sampling_params: Any, sample: Sample, llm_engine: Any, evaluation: bool, **more: Any
    ) -> list[dict[str, Any]]:
        """Plays one episode; see AgentExecutorBase.execute. `sample` has the prompt and its ids."""
        where = f"{llm_engine.name}: {self.title}"
        given = {"llm_engine": llm_engine, "evaluation": evaluation, **more}
        keywords = {key: given[key] for key in GENERATE_KEYWORDS if accepts_keyword(self._function, key)}
        reply = await self._function(self._args, sample, sampling_params, **keywords)
        samples = list(reply) if isinstance(reply, list | tuple) else [reply]
        for part in samples:
            if not isinstance(part, Sample):
                raise AgentError(f"{where} returned a {type(part).__name__}; return the sample, or a list of samples")
        outputs = [self._output(part, where) for part in samples if part.status != SampleStatus.ABORTED]
        if not outputs:
            raise AgentError(f"{where} returned " + ("only aborted samples" if samples else "no sample"))
        return outputs

    def _output(self, sample: Sample, where: str) -> dict[str, Any]:
        """What `trajectory_from_agent_output` reads."""
        start = len(sample.tokens) - sample.response_length
        mask = [1] * sample.response_length if sample.loss_mask is None else [*map(int, sample.loss_mask)]
        if start < 0 or len(mask) != sample.response_length:
            raise AgentError(
                f"{where} returned {len(sample.tokens)} tokens, response_length {sample.response_length} and a "
                f"loss_mask of {len(mask)}, which don't agree; sample.append(ids, sampled=True) keeps them in step"
            )
        if len(sample.tokens) > self._args.max_len:
            raise AgentError(f"{where} returned {len(sample.tokens)} tokens, --max_len is {self._args.max_len}")
        edges = [i for i, (a, b) in enumerate(itertools.pairwise([0, *mask, 0])) if a != b]
        logprobs = sample.rollout_log_probs
        try:
            reward, score, logs = split_reward(sample.reward, self._args.reward_key)
        except ValueError as error:
            raise AgentError(f"{where} set as reward {error}") from error
        return {
            "observation_tokens": sample.tokens,
            "action_ranges": [(start + a, start + b) for a, b in zip(edges[::2], edges[1::2], strict=True)],
            "rollout_log_probs": None if logprobs is None else [*([0.0] * start), *logprobs],
            "reward": reward,
            "scores": sample.score if score is None else score,
            "truncated": None if sample.status == SampleStatus.PENDING else sample.status == SampleStatus.TRUNCATED,
            "extra_logs": {**logs, **sample.extra_logs},
            "metadata": sample.metadata,
        }


# --- rewards ----------------------------------------------------------------------------------------------------------


class SampleReward(FunctionReward):
    """Scores with ``rm(args, sample)``, or all samples of a prompt at once with ``rm(args, samples)``.

    Args:
        function: the hook.
        args: configuration of the run: ``group_rm``, ``reward_key``.
    """

    def __init__(self, function: Hook, args: Any) -> None:
        super().__init__(function, source_of(function), max_concurrency=64)
        self._args = args
        self._batches = BatchCaller(self._where, one_by_one=not args.group_rm)

    async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """See FunctionReward.score; with ``group_rm`` the batch is a group."""
        if not self._args.group_rm or not batch:
            return await super().score(batch)
        try:
            return await self._call(batch)
        except RewardError as error:
            error.isolatable = False  # a group is scored whole or not at all
            raise

    def _arguments(self, batch: Sequence[RewardRequest]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        samples = [_sample(request) for request in batch]
        return (self._args, samples if self._args.group_rm else samples[0]), {}

    def _results(self, reply: Any, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        replies = [reply] if not self._args.group_rm else list(reply) if isinstance(reply, list | tuple) else None
        if replies is None or len(replies) != len(batch):
            got = type(reply).__name__ if replies is None else f"{len(replies)} rewards"
            raise RewardError(f"{self._where} returned {got} for {len(batch)} samples; return a list, one for each")
        try:
            rewards, scores, logs = zip(*(split_reward(one, self._args.reward_key) for one in replies), strict=True)
        except ValueError as error:
            raise RewardError(f"{self._where} returned {error} for {batch[0].sample}", isolatable=True) from error
        names = sorted({name for own in logs for name in own})
        columns: dict[str, Any] = {
            "rewards": rewards,
            "scores": [r if s is None else s for r, s in zip(rewards, scores, strict=True)],
            "extra_logs": {name: [own.get(name) for own in logs] for name in names},
        }
        return parse_reply(columns, batch, self._where)


def _sample(request: RewardRequest) -> Sample:
    if request.trajectory is not None:
        return Sample.of(request.trajectory)
    response = request.query[len(request.prompt) :]
    return Sample(prompt=request.prompt, label=request.label, metadata=dict(request.metadata), response=response)


# --- filters ----------------------------------------------------------------------------------------------------------


async def judge_group(function: Hook, args: Any, trajectories: Sequence[Trajectory]) -> DynamicFilterOutput:
    """What ``keep(args, samples)`` says about a finished group.

    Args:
        function: the hook.
        args: configuration of the run.

    Raises:
        HookError: it raised, took too long, or returned something else; names file and line.
    """
    reply = await _called(function, args, [Sample.of(trajectory) for trajectory in trajectories])
    if isinstance(reply, bool | np.bool_):
        return DynamicFilterOutput(bool(reply), None if reply else "not_kept")
    if not hasattr(reply, "keep"):
        raise HookError(
            f"{name_of(function)} returned a {type(reply).__name__}; return a bool or a DynamicFilterOutput"
        )
    reason = None if reply.keep else str(getattr(reply, "reason", None) or "not_kept")
    return DynamicFilterOutput(bool(reply.keep), reason, bool(getattr(reply, "keep_when_insufficient", False)))


async def _called(function: Hook, *args: Any) -> Any:
    name = name_of(function)
    try:
        return await call_user_code(function, *args, seconds=_FILTER_SECONDS)
    except DeadlinePassed as error:
        raise HookError(f"{name} did not return within {_FILTER_SECONDS:g} s") from error
    except Exception as error:
        place = user_location(error, source_of(function))
        raise HookError(f"{name} raised {describe_exception(error)} at {place}") from error


class BufferFilter:
    """A selection for `RolloutBuffer.take`: a built-in by name, or ``select(args, groups, count)``.

    When it fails, the oldest groups are taken; `pop_failures` counts that, `last_error` says why.

    Args:
        path: value of ``--buffer_filter_path``.
        args: configuration of the run.
    """

    def __init__(self, path: str, args: Any) -> None:
        self._select: Selection = SELECTIONS.get(path) or self._ask
        self._function = None if path in SELECTIONS else load_hook("buffer_filter_path", path)
        self._args = args
        self._failures = 0
        self.last_error = ""

    def __call__(self, groups: Sequence[Group], count: int) -> list[int]:
        """Indices of `count` groups."""
        try:
            return list(self._select(groups, count)) if count else []
        except (RolloutError, ValueError, TypeError) as error:
            self._failures += 1
            self.last_error = str(error)
            logger.warning("the oldest groups are taken from the buffer: %s", error)
            return oldest_first(groups, count)

    def pop_failures(self) -> int:
        """How many times it failed since the last call."""
        failures, self._failures = self._failures, 0
        return failures

    def _ask(self, groups: Sequence[Group], count: int) -> list[int]:
        assert self._function is not None
        samples = [[Sample.of(trajectory) for trajectory in group.trajectories] for group in groups]
        reply = asyncio.run(_called(self._function, self._args, samples, count))
        return checked_selection(reply, len(groups), count, name_of(self._function))
