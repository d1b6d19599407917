"""The reward interface: requests in, results out, and the checks every reward reply goes through."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.trajectory import Trajectory


@dataclass(frozen=True)
class RewardRequest:
    """One finished sample that wants a reward.

    Attributes:
        query: prompt text followed by response text.
        prompt: prompt text as the model saw it.
        label: raw value of the label column, "" without one.
        metadata: further facts (datasource, response, sample index, columns of the row).
        sample: name for messages, such as "prompt 7 sample 3".
        trajectory: what it was made of, if there is more than texts.
    """

    query: str
    prompt: str
    label: Any = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sample: str = "sample"
    trajectory: Trajectory | None = None

    @classmethod
    def of(cls, trajectory: Trajectory, place: str = "") -> RewardRequest:
        """The request for a trajectory without a reward; `place` goes before the sample's name."""
        t = trajectory
        facts = {key: value for key, value in t.metadata.items() if key not in ("prompt", "label")}
        facts |= {"prompt_id": t.prompt_id, "sample_index": t.sample_index, "truncated": t.truncated}
        facts["response_length"] = t.response_length
        prompt = str(t.metadata.get("prompt", ""))
        query = prompt + str(t.metadata.get("response", ""))
        name = f"{place}prompt {t.prompt_id} sample {t.sample_index}"
        return cls(query, prompt, t.metadata.get("label", ""), facts, name, t)


@dataclass(frozen=True)
class RewardResult:
    """The verdict on one sample.

    Attributes:
        reward: what advantages are made of.
        score: what dynamic filtering looks at; equals the reward where the source gives none.
        extra_logs: numbers to log, by name.
    """

    reward: float
    score: float
    extra_logs: Mapping[str, float] = field(default_factory=dict)


class RewardSource(Protocol):
    """Anything that scores finished samples."""

    async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """Returns one result for each request, in order; an empty batch gives an empty list.

        Raises:
            RewardError: no valid result could be had.
        """
        ...

    async def close(self) -> None:
        """Releases connections and threads."""
        ...


class SingleValueReply(Exception):
    """A batch of several samples was answered with one value: the source scores one sample per call."""


class UnusableValue(RewardError):
    """An answer has an entry for each sample, but one of them is no number."""

    def __init__(self, message: str) -> None:
        super().__init__(message, isolatable=True)


def parse_reply(reply: Any, batch: Sequence[RewardRequest], where: str) -> list[RewardResult]:
    """Checks what a reward function or server returned for `batch` and splits it into results.

    Accepted: a mapping with "rewards" and optional "scores" and "extra_logs", or the bare rewards. Rewards
    and scores are a number (one sample only) or a list, array or tensor with one number for each sample. An
    extra log is one number for all samples or one number each; of several numbers for one sample the first counts.

    Args:
        reply: the raw value.
        batch: the requests, not empty.
        where: what returned it, for messages (file and function, or URL).

    Raises:
        RewardError: wrong keys, wrong length, or a value that is not a finite number (the sample is named).
        SingleValueReply: one value came back for several samples.
    """
    logs: Mapping[str, Any] = {}
    scores: Any = None
    rewards = reply
    if isinstance(reply, Mapping):
        if "rewards" not in reply:
            raise RewardError(
                f'{where} returned a dict without the key "rewards" (keys: {sorted(map(str, reply))}). '
                'Return {"rewards": [one number per sample], "scores": [...], "extra_logs": {...}}.'
            )
        rewards, scores, logs = reply["rewards"], reply.get("scores"), reply.get("extra_logs") or {}
        if not isinstance(logs, Mapping):
            raise RewardError(
                f'{where} returned "extra_logs" of type {type(logs).__name__}; return a dict of name to numbers.'
            )
    reward_values = _numbers(rewards, "rewards", batch, where)
    # None is the only "missing": a score of 0.0 is a score.
    score_values = reward_values if scores is None else _numbers(scores, "scores", batch, where)
    log_columns = {str(name): _log_column(value, str(name), batch, where) for name, value in logs.items()}
    results = []
    for index, (reward, score) in enumerate(zip(reward_values, score_values, strict=True)):
        own = {name: column[index] for name, column in log_columns.items()}
        results.append(RewardResult(reward, score, {name: value for name, value in own.items() if value is not None}))
    return results


def as_list(value: Any) -> list[Any]:
    """Turns a number, list, NumPy array or tensor into a flat Python list (without importing torch)."""
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [value]
    # Servers may answer [[r], [r]]: a column of shape (N, 1) is one number per sample.
    return [item[0] if isinstance(item, (list, tuple)) and len(item) == 1 else item for item in value]


def as_number(value: Any) -> float | None:
    """Returns the float of a number, bool, NumPy scalar or one-element tensor; None for anything else."""
    items = as_list(value)
    if len(items) != 1:
        return None
    if hasattr(items[0], "tolist"):
        return as_number(items[0])
    return float(items[0]) if isinstance(items[0], (int, float)) else None


def finite_number(value: Any) -> float | None:
    """As :func:`as_number`, and None also for NaN and infinities."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def sample_names(batch: Sequence[RewardRequest]) -> str:
    """The samples of a batch, for messages."""
    return batch[0].sample + (f" and {len(batch) - 1} more" if len(batch) > 1 else "")


def _numbers(value: Any, key: str, batch: Sequence[RewardRequest], where: str) -> list[float]:
    if value is None:
        raise RewardError(
            f'{where} returned None for "{key}"; return one number per sample ({len(batch)} here).', isolatable=True
        )
    items = as_list(value)
    if len(items) != len(batch):
        if len(items) == 1 and len(batch) > 1:
            raise SingleValueReply
        raise RewardError(
            f'{where} returned {len(items)} values in "{key}" for {len(batch)} samples; return one number per sample.',
            isolatable=False,
        )
    numbers = []
    for request, item in zip(batch, items, strict=True):
        number = finite_number(item)
        if number is None:
            raise UnusableValue(
                f'{where} returned {_short(item)} in "{key}" for {request.sample}; it must be a finite number.'
            )
        numbers.append(number)
    return numbers


def _log_column(value: Any, name: str, batch: Sequence[RewardRequest], where: str) -> list[float | None]:
    items = [None] * len(batch) if value is None else as_list(value)
    if len(items) == 1:
        items = items * len(batch)
    elif len(batch) == 1 and items:
        items = items[:1]  # functions for one sample may log vectors, of which OpenRLHF takes the first number
    if len(items) != len(batch):
        raise RewardError(
            f"{where} returned {len(items)} values in extra_logs[{name!r}] for {len(batch)} samples; "
            "return one number, or one number per sample."
        )
    column: list[float | None] = []
    for request, item in zip(batch, items, strict=True):
        number = None if item is None else as_number(item)
        if item is not None and number is None:
            raise UnusableValue(
                f"{where} returned {_short(item)} in extra_logs[{name!r}] for {request.sample}; it must be a number."
            )
        column.append(number)
    return column


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
