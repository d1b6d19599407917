"""Named errors of the rollout package: each says what failed, where, and what to do about it."""

from __future__ import annotations

import os
import traceback

from openrlhf.utils.errors import ExplainedError


class RolloutError(ExplainedError, RuntimeError):
    """Base of all errors that the rollout package raises on purpose."""


class EngineError(RolloutError):
    """The generation engine failed or broke its contract; never charged to the user's agent code."""

    needs_log = True


class AgentError(RolloutError):
    """The user's agent code failed or broke its contract (file, line and sample are in the message)."""


class EpisodeTimeout(RolloutError):
    """One episode did not end within its time limit."""


class RolloutTimeout(RolloutError):
    """A whole rollout did not end within its deadline."""


class RewardError(RolloutError):
    """A reward could not be computed.

    Attributes:
        isolatable: the failure depends on the samples themselves (bad value, exception for one input), so
            scoring the samples of the batch one by one can save the others. False where the server is down.
    """

    def __init__(self, message: str, *, isolatable: bool = False) -> None:
        super().__init__(message)
        self.isolatable = isolatable


class SampleError(RolloutError):
    """Samples lack what training or evaluation needs; the message names the first of them."""


class NoLearnableGroups(RolloutError):
    """Dynamic filtering found too few groups that carry a learning signal."""


def user_location(error: BaseException, path: str | None) -> str:
    """Returns ``file:line`` of the deepest frame of `error` in `path`, or of the deepest frame anywhere.

    Args:
        error: an exception with a traceback.
        path: the user's file; frames of other files are passed over where one of this file exists.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return path or "unknown location"
    own = [frame for frame in frames if path is not None and os.path.realpath(frame.filename) == os.path.realpath(path)]
    deepest = (own or frames)[-1]
    return f"{deepest.filename}:{deepest.lineno}"


def describe_exception(error: BaseException) -> str:
    """Returns ``Type: message`` of an exception, for use inside a longer sentence."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
