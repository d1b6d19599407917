"""The unit of rollout data: one sampled sequence with all that training, dumps and checkpoints need."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from openrlhf.rollout.protocol import PlacedImage

FINISH_REASONS = ("stop", "length", "abort")

COLUMNS = ("token_ids", "action_mask", "logprobs", "weight_version")
"""The per-token arrays of a trajectory."""

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled sequence: prompt, actions of the policy, and environment tokens, in one row of ids.

    Index t of every per-token array describes token t of the sequence. T is the number of tokens.

    Attributes:
        prompt_id: number of the data row that the prompt came from.
        group_id: the group that advantages are compared in; samples of one prompt and draw share it.
        sample_index: position of this sample within its group.
        token_ids: int32[T], prompt and everything after it.
        action_mask: bool[T], True where the policy sampled the token.
        logprobs: float32[T] or None, log-probabilities at sampling time in nats; 0 where not an action.
        weight_version: int32[T], version of the weights that sampled the token; -1 where not an action.
        reward: scalar that advantages are made of; None while a reward model has yet to give it.
        score: scalar that filtering looks at; None like `reward`.
        step_rewards: (position, value) pairs for rewards of single steps; positions are action tokens.
        finish_reason: "stop", "length" or "abort", of the last turn.
        truncated: the length limit cut the last turn or the episode.
        turn_limit: most tokens of the last turn, where an agent's request had less than the episode's room.
        extra_logs: numbers that the reward or the agent wants logged.
        metadata: label, datasource, prompt text and other facts about the sample.
        timings: seconds spent, by name.
        images: in the order of their places.

    Raises:
        ValueError: shapes disagree, a value has the wrong kind, or a masked position carries data.
    """

    prompt_id: int
    group_id: int
    sample_index: int
    token_ids: IntArray
    action_mask: BoolArray
    logprobs: FloatArray | None
    weight_version: IntArray
    reward: float | None = None
    score: float | None = None
    step_rewards: tuple[tuple[int, float], ...] = ()
    finish_reason: str = "stop"
    truncated: bool = False
    turn_limit: int | None = None
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "token_ids", _vector(self.token_ids, np.int32, "token_ids"))
        set_field(self, "action_mask", _vector(self.action_mask, np.bool_, "action_mask"))
        set_field(self, "weight_version", _vector(self.weight_version, np.int32, "weight_version"))
        if self.logprobs is not None:
            set_field(self, "logprobs", _vector(self.logprobs, np.float32, "logprobs"))
        set_field(self, "step_rewards", tuple((int(p), float(v)) for p, v in self.step_rewards))
        set_field(self, "truncated", bool(self.truncated))
        problem = next(self._problems(), None)
        if problem is not None:
            raise ValueError(f"Trajectory of prompt {self.prompt_id} sample {self.sample_index}: {problem}")

    def _problems(self) -> Iterator[str]:
        expected, mask = self.total_length, self.action_mask
        for name in ("action_mask", "weight_version", "logprobs"):
            column = getattr(self, name)
            if column is not None and column.shape[0] != expected:
                yield f"{name} has {column.shape[0]} entries, token_ids has {expected}"
        if self.logprobs is not None:
            for position in np.flatnonzero(~np.isfinite(self.logprobs)):
                yield (
                    f"logprobs[{position}] is {self.logprobs[position]} (token id {self.token_ids[position]}); a "
                    "sampled token has a finite log-probability"
                )
            if np.any(self.logprobs[~mask]):
                yield "logprobs must be 0 where action_mask is False"
        if np.any(self.weight_version[~mask] != -1):
            yield "weight_version must be -1 where action_mask is False"
        if np.any(self.weight_version[mask] < 0):
            yield "weight_version must be >= 0 on action tokens"
        if self.finish_reason not in FINISH_REASONS:
            yield f"finish_reason is {self.finish_reason!r}, not one of {FINISH_REASONS}"
        for name in ("reward", "score"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                yield f"{name} is {value}; it must be finite or None"
        for image in self.images:
            end = image.offset + image.length
            if not 0 <= image.offset < end <= expected or mask[image.offset : end].any():
                yield f"tokens {image.offset} to {end} can't be an image's"
        for position, value in self.step_rewards:
            if not 0 <= position < expected or not mask[position]:
                yield f"step reward {value} at position {position}, not an action token"
            if not math.isfinite(value):
                yield f"step reward at position {position} is {value}"

    @property
    def total_length(self) -> int:
        """Number of tokens, T."""
        return int(self.token_ids.shape[0])

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.action_mask.sum())

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first action token (T where there is none)."""
        actions = np.flatnonzero(self.action_mask)
        return int(actions[0]) if actions.size else self.total_length

    def room(self, max_new_tokens: int | None, max_len: int) -> int:
        """Tokens that were left until a length limit cuts it; 0 where one did.

        Args:
            max_new_tokens: limit of each turn, of which the last counts, where `turn_limit` has none; None = none.
            max_len: limit of prompt and everything after it.
        """
        room = max_len - self.total_length
        limit = max_new_tokens if self.turn_limit is None else self.turn_limit
        if limit is not None:
            actions = np.flatnonzero(self.action_mask)
            starts = np.flatnonzero(np.diff(actions, prepend=-2) > 1)  # of the turns, among the action tokens
            last_turn = len(actions) - int(starts[-1]) if starts.size else 0
            room = min(room, limit - last_turn)
        return max(room, 0)

    @property
    def min_version(self) -> int:
        """Oldest weight version among the action tokens, -1 where there is none."""
        versions = self.weight_version[self.action_mask]
        return int(versions.min()) if versions.size else -1

    def to_dict(self, *, lists: bool = True) -> dict[str, Any]:
        """Returns a plain dict that `from_dict` turns back into an equal trajectory.

        Args:
            lists: arrays as Python lists (for JSON); False keeps the NumPy arrays (smaller and faster).
        """

        def column(array: npt.NDArray[Any] | None) -> Any:
            return array if array is None or not lists else array.tolist()

        images = [[i.offset, i.length, base64.b64encode(i.data).decode() if lists else i.data] for i in self.images]
        return {
            **vars(self),
            **{name: column(getattr(self, name)) for name in COLUMNS},
            "step_rewards": [list(pair) for pair in self.step_rewards],
            "images": images,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """Builds a trajectory from `to_dict` output; unknown keys are an error.

        Raises:
            ValueError: a key is missing or unknown, or the values do not make a valid trajectory.
        """
        required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        missing = sorted(required - set(data))
        if unknown or missing:
            raise ValueError(f"not a trajectory record: unknown keys {unknown}, missing keys {missing}")
        images = tuple(
            PlacedImage(offset, length, content if isinstance(content, bytes) else base64.b64decode(content))
            for offset, length, content in data.get("images", ())
        )
        return cls(**{**data, "images": images})


def _vector(values: Sequence[Any] | npt.NDArray[Any], dtype: type[np.generic], name: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"Trajectory: {name} must have one dimension, got shape {array.shape}")
    if dtype is np.int32 and array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"Trajectory: {name} must hold integers, got {array.dtype}")
    return array.astype(dtype, copy=False)
