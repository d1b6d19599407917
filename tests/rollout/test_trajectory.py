"""Trajectory: validation and the way to plain data and back."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openrlhf.rollout.sample import Sample, SampleStatus
from openrlhf.rollout.trajectory import Trajectory


def values(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "prompt_id": 3,
        "group_id": 9,
        "sample_index": 1,
        "token_ids": [5, 6, 7, 8],
        "action_mask": [False, True, False, True],
        "logprobs": [0.0, -0.25, 0.0, -1.1],
        "weight_version": [-1, 2, -1, 3],
        "reward": 0.5,
        "score": 0.0,
        "step_rewards": ((1, 0.1), (3, 0.4)),
        "finish_reason": "length",
        "truncated": True,
        "extra_logs": {"a": 1.0},
        "metadata": {"label": "x"},
        "timings": {"generation": 0.1},
    }
    return {**base, **changes}


def test_fields_have_their_types_and_lengths() -> None:
    trajectory = Trajectory(**values())
    assert trajectory.token_ids.dtype == np.int32 and trajectory.action_mask.dtype == np.bool_
    assert trajectory.logprobs is not None and trajectory.logprobs.dtype == np.float32
    assert trajectory.weight_version.dtype == np.int32
    assert (trajectory.total_length, trajectory.response_length, trajectory.prompt_length) == (4, 2, 1)
    assert trajectory.min_version == 2
    nothing = Trajectory(**values(action_mask=[0] * 4, weight_version=[-1] * 4, logprobs=None, step_rewards=()))
    assert (nothing.response_length, nothing.prompt_length, nothing.min_version) == (0, 4, -1)


@pytest.mark.parametrize("mask", ["00111", "00111000", "0110110111100", "0100100", "111", "0000"])
@pytest.mark.parametrize("limit", [None, 3, 4, 9])
def test_room_until_a_limit_cuts_the_last_turn(mask: str, limit: int | None) -> None:
    actions = [digit == "1" for digit in mask]
    versions = [0 if action else -1 for action in actions]
    trajectory = Trajectory(
        **values(
            token_ids=range(len(mask)), action_mask=actions, weight_version=versions, logprobs=None, step_rewards=()
        )
    )
    last_turn = len(mask.rstrip("0").rpartition("0")[2])
    for max_len in (len(mask), len(mask) + 2, 100):
        left = [max_len - len(mask), *([] if limit is None else [limit - last_turn])]
        assert trajectory.room(limit, max_len) == max(0, min(left))
        assert replace(trajectory, turn_limit=limit).room(1 if limit else None, max_len) == max(0, min(left))


@pytest.mark.parametrize("lists", [True, False])
def test_plain_data_and_back(lists: bool) -> None:
    trajectory = Trajectory(**values())
    data = trajectory.to_dict(lists=lists)
    data = json.loads(json.dumps(data)) if lists else pickle.loads(pickle.dumps(data))
    again = Trajectory.from_dict(data)
    for name in Trajectory.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(trajectory, name), err_msg=name)
    assert Trajectory.from_dict(Trajectory(**values(logprobs=None)).to_dict()).logprobs is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action_mask": [True]}, "prompt 3 sample 1: action_mask has 1 entries, token_ids has 4"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries"),
        ({"weight_version": [0]}, "weight_version has 1 entries"),
        ({"token_ids": [[5, 6, 7, 8]]}, r"token_ids must have one dimension, got shape \(1, 4\)"),
        ({"token_ids": [5.0, 6.0, 7.0, 8.0]}, "token_ids must hold integers, got float64"),
        ({"logprobs": [0.0, float("nan"), 0.0, 0.0]}, r"logprobs\[1\] is nan \(token id 6\)"),
        ({"logprobs": [0.0, -np.inf, 0.0, 0.0]}, r"logprobs\[1\] is -inf"),
        ({"logprobs": [-1.0, 0.0, 0.0, 0.0]}, "logprobs must be 0 where action_mask is False"),
        ({"weight_version": [0, 2, -1, 2]}, "weight_version must be -1 where action_mask is False"),
        ({"weight_version": [-1, -1, -1, 2]}, "weight_version must be >= 0 on action tokens"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos', not one of"),
        ({"reward": float("nan")}, "reward is nan; it must be finite or None"),
        ({"score": float("inf")}, "score is inf"),
        ({"step_rewards": ((2, 1.0),)}, "step reward 1.0 at position 2, not an action token"),
        ({"step_rewards": ((4, 1.0),)}, "step reward 1.0 at position 4"),
        ({"step_rewards": ((1, float("nan")),)}, "step reward at position 1 is nan"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trajectory(**values(**changes))


def test_records_with_other_keys_are_refused() -> None:
    data = Trajectory(**values()).to_dict()
    data["surprise"] = data.pop("token_ids")
    with pytest.raises(ValueError, match=r"unknown keys \['surprise'\], missing keys \['token_ids'\]"):
        Trajectory.from_dict(data)
    del data["surprise"]
    with pytest.raises(ValueError, match=r"unknown keys \[\], missing keys \['token_ids'\]"):
        Trajectory.from_dict(data)


def test_records_may_lack_what_has_a_default() -> None:
    needed = ("prompt_id", "group_id", "sample_index", "token_ids", "action_mask", "logprobs", "weight_version")
    again = Trajectory.from_dict({name: values()[name] for name in needed})
    assert again.token_ids.tolist() == [5, 6, 7, 8] and again.reward is None and again.metadata == {}


# --- what hooks see of it


def test_a_sample_has_everything_of_its_trajectory() -> None:
    facts = {"label": "x", "prompt": "p", "response": "r", "datasource": {"a": 1}}
    trajectory = Trajectory(**values(metadata=facts, weight_version=[-1, 4, -1, 2]))
    sample = Sample.of(trajectory)
    assert sample == Sample(
        index=1,
        group_index=9,
        prompt_id=3,
        prompt="p",
        label="x",
        metadata={"datasource": {"a": 1}},
        tokens=[5, 6, 7, 8],
        response="r",
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_log_probs=[np.float32(x) for x in (-0.25, 0.0, -1.1)],
        reward=0.5,
        score=0.0,
        status=SampleStatus.TRUNCATED,
        extra_logs={"a": 1.0},
        weight_versions=[2, 4],
    )
    sample.metadata["datasource"]["a"] = sample.extra_logs["a"] = 7  # a copy, free to change
    assert facts["datasource"] == {"a": 1} and trajectory.extra_logs == {"a": 1.0}


@pytest.mark.parametrize(
    ("reason", "truncated", "status"),
    [
        ("stop", False, SampleStatus.COMPLETED),
        ("stop", True, SampleStatus.TRUNCATED),
        ("abort", False, SampleStatus.ABORTED),
    ],
)
def test_how_a_sample_ended(reason: str, truncated: bool, status: SampleStatus) -> None:
    sample = Sample.of(Trajectory(**values(finish_reason=reason, truncated=truncated, logprobs=None)))
    assert sample.status is status and sample.rollout_log_probs is None


def test_ids_behind_a_response_that_has_no_mask_yet() -> None:
    sample = Sample(tokens=[5, 6, 7], response_length=2)
    sample.append([8], sampled=False)
    sample.append([9, 3], sampled=True)
    assert (sample.tokens, sample.response_length) == ([5, 6, 7, 8, 9, 3], 5)
    assert sample.loss_mask == [1, 1, 0, 1, 1]
