"""From the dict that an agent's `execute` returns to a checked trajectory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from openrlhf.rollout.agent_engine import EngineCall
from openrlhf.rollout.errors import AgentError
from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.rewards.base import as_list, as_number, finite_number
from openrlhf.rollout.trajectory import BoolArray, FloatArray, IntArray, Trajectory

logger = logging.getLogger(__name__)

CUT_TOKENS = "cut_observation_tokens"
"""Key of the metadata: how many tokens of what the policy was shown did not fit. Only there where some were cut."""

_KEYS = (
    'Return {"prompt", "label", "observation_tokens": [ids], "action_ranges": [(start, end)], '
    '"rollout_log_probs": [floats] or None, "reward", "scores", "truncated", "extra_logs"}.'
)


def trajectory_from_agent_output(
    output: Any,
    *,
    prompt_id: int,
    group_id: int,
    sample_index: int,
    calls: Sequence[EngineCall] = (),
    max_length: int | None = None,
    weight_version: int = 0,
    want_logprobs: bool = False,
    metadata: Mapping[str, Any] | None = None,
    where: str = "the agent",
) -> Trajectory:
    """Checks the dict of an agent executor and turns it into a Trajectory.

    Sampled ids are compared with what the engine returned in `calls`. From there come weight versions, and
    log-probabilities that the agent did not hand back.

    Args:
        output: what `execute` returned.
        calls: the episode's generations.
        max_length: most tokens of the episode; what is beyond it, behind all actions, is cut. None = no limit.
        weight_version: of the tokens, where there were no calls.
        want_logprobs: training needs sampling log-probabilities.
        metadata: facts to attach to the trajectory.
        where: sample and executor, for messages.

    Raises:
        AgentError: a key is missing, a value breaks the contract, or actions are beyond `max_length`.
    """
    if not isinstance(output, Mapping):
        raise AgentError(f"{where} returned {type(output).__name__}, not a dict. {_KEYS}")
    missing = [key for key in ("observation_tokens", "action_ranges") if output.get(key) is None]
    if missing:
        raise AgentError(f"{where} returned a dict without {missing} (keys: {sorted(map(str, output))}). {_KEYS}")
    ids = _token_ids(output["observation_tokens"], where)
    ranges = _ranges(output["action_ranges"], len(ids), where)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, end in ranges:
        mask[start:end] = True
    sampled = _match_calls(ids, ranges, calls)
    versions, unmatched = _versions(ids, ranges, sampled, calls, weight_version)
    _warn_of_unsampled(unmatched, len(ranges), where)
    logprobs = _logprobs(output.get("rollout_log_probs"), ids, ranges, mask, sampled, where) if want_logprobs else None
    reward = _optional_number(output.get("reward"), "reward", where)
    score = _optional_number(output.get("scores"), "scores", where)
    last = sampled[-1] or (calls[-1] if calls else None)
    truncated, finish = _ending(output.get("truncated"), last)
    facts = dict(metadata or {})
    if unmatched:
        facts["unsampled_action_ranges"] = unmatched
    images = _images(ids, mask, calls, where)
    end = _kept(len(ids), ranges[-1][1], images, max_length, where)
    if end < len(ids):
        facts[CUT_TOKENS] = facts.get(CUT_TOKENS, 0) + len(ids) - end
        warn_of_cut(where.rpartition(": ")[2], "put behind the last action")
    return Trajectory(
        prompt_id=prompt_id,
        group_id=group_id,
        sample_index=sample_index,
        token_ids=ids[:end],
        action_mask=mask[:end],
        logprobs=None if logprobs is None else logprobs[:end],
        weight_version=versions[:end],
        reward=reward,
        score=reward if score is None else score,
        step_rewards=_step_rewards(output.get("step_rewards"), where),
        finish_reason=finish,
        truncated=truncated,
        turn_limit=None if last is None else last.limit,
        extra_logs=_extra_logs(output.get("extra_logs"), where),
        metadata=facts,
        images=tuple(image for image in images if image.offset < end),
    )


def _warn_of_unsampled(unmatched: int, total: int, where: str) -> None:
    if unmatched:
        logger.warning(
            "%s: %d of %d action ranges hold ids that the engine did not sample there; training on them "
            "is off-policy. Append outputs[0].token_ids as they are, don't encode text again.",
            where,
            unmatched,
            total,
        )


def _ending(truncated: Any, last: EngineCall | None) -> tuple[bool, str]:
    """Whether a limit cut the episode, and its finish reason; executors of 0.9.x leave it to the last turn's."""
    reason = "stop" if last is None else last.result.finish_reason
    cut = reason == "length" if truncated is None else bool(as_list(truncated)[0])
    return cut, "length" if cut else reason


@functools.cache
def warn_of_cut(agent: str, what: str) -> None:
    """Say once of each agent that some of its text did not fit."""
    logger.warning(
        "some of what %s %s is beyond the limit of tokens (--max_len) and was cut; the metric "
        "rollout/cut_observations_rate counts such samples",
        agent,
        what,
    )


def _kept(length: int, actions_end: int, images: Sequence[PlacedImage], max_length: int | None, where: str) -> int:
    """How many of the tokens stay: all that fit, but no part of an image."""
    if max_length is None or length <= max_length:
        return length
    if actions_end > max_length:
        raise AgentError(
            f"{where} returned {length} tokens, the last action ends at {actions_end}, and --max_len is {max_length}; "
            "llm_engine.generate() never goes past it, so an action must be where it was sampled"
        )
    return min([max_length, *(i.offset for i in images if i.offset < max_length < i.offset + i.length)])


def _images(ids: IntArray, mask: BoolArray, calls: Sequence[EngineCall], where: str) -> tuple[PlacedImage, ...]:
    """The images that the engine saw: those of the call with most of them."""
    call = max(calls, key=lambda call: len(call.images), default=None)
    if call is None or not call.images:
        return ()
    for image in call.images:
        end = image.offset + image.length
        same = ids[image.offset : end].tolist() == call.prompt_token_ids[image.offset : end]
        if not same or mask[image.offset : end].any():
            raise AgentError(
                f"{where}: observation_tokens {image.offset} to {end} are not the image that the engine saw there; "
                "begin with llm_engine.prompt_token_ids or an output's prompt_token_ids, which have all of its tokens"
            )
    return call.images


def _token_ids(value: Any, where: str) -> IntArray:
    ids = as_list(value)
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or token < 0:
            raise AgentError(f"{where}: observation_tokens[{position}] is {token!r}, not a token id")
    if not ids:
        raise AgentError(f"{where}: observation_tokens is empty")
    return np.asarray(ids, dtype=np.int32)


def _ranges(value: Any, length: int, where: str) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    previous = 0
    for pair in value:
        try:
            start, end = (int(bound) for bound in pair)
        except (TypeError, ValueError) as error:
            raise AgentError(f"{where}: action_ranges holds {pair!r}; each entry is (start, end)") from error
        if not previous <= start <= end <= length:
            raise AgentError(
                f"{where}: action range ({start}, {end}) is outside the {length} tokens, reversed, or "
                f"overlaps the one before (which ends at {previous}); ranges are (start, end), end not "
                "included"
            )
        previous = end
        if end > start:
            ranges.append((start, end))
    if not ranges:
        raise AgentError(f"{where}: no action tokens; action_ranges must mark at least one sampled token")
    return ranges


def _match_calls(
    ids: IntArray, ranges: Sequence[tuple[int, int]], calls: Sequence[EngineCall]
) -> list[EngineCall | None]:
    """Finds for each action range the call that sampled exactly its ids, preferably at its position."""
    by_ids: dict[tuple[int, ...], list[EngineCall]] = {}
    for call in calls:
        by_ids.setdefault(tuple(int(token) for token in call.result.token_ids), []).append(call)
    matches: list[EngineCall | None] = []
    for start, end in ranges:
        candidates = by_ids.get(tuple(ids[start:end].tolist()), [])
        here = [call for call in candidates if len(call.prompt_token_ids) == start]
        found = here or candidates
        matches.append(found[0] if found else None)
    return matches


def _versions(
    ids: IntArray,
    ranges: Sequence[tuple[int, int]],
    sampled: Sequence[EngineCall | None],
    calls: Sequence[EngineCall],
    current: int,
) -> tuple[IntArray, int]:
    """Weight version of each token, and the number of ranges that no call accounts for."""
    versions = np.full(len(ids), -1, dtype=np.int32)
    known = [int(np.min(call.result.weight_version)) for call in calls]
    # An agent that samples by other means (a server of its own) leaves no record: nothing to compare with.
    oldest = min(known) if known else current
    unmatched = 0
    for (start, end), call in zip(ranges, sampled, strict=True):
        versions[start:end] = oldest if call is None else call.result.weight_version
        unmatched += call is None and bool(calls)
    return versions, unmatched


def _logprobs(
    value: Any,
    ids: IntArray,
    ranges: Sequence[tuple[int, int]],
    mask: BoolArray,
    sampled: Sequence[EngineCall | None],
    where: str,
) -> FloatArray:
    logprobs = np.zeros(len(ids), dtype=np.float32)
    if value is not None:
        given = as_list(value)
        if len(given) != len(ids):
            raise AgentError(
                f"{where}: rollout_log_probs has {len(given)} entries, observation_tokens has {len(ids)}; "
                "give one per token, 0.0 on tokens that were not sampled"
            )
        for position in np.flatnonzero(mask):
            number = finite_number(given[position])
            if number is None:
                raise AgentError(f"{where}: rollout_log_probs[{position}] is {given[position]!r}, not a finite number")
            logprobs[position] = number
        return logprobs
    for (start, end), call in zip(ranges, sampled, strict=True):
        if call is None or call.result.logprobs is None:
            raise AgentError(
                f"{where}: rollout_log_probs is None, but training needs sampling log-probabilities, and "
                f"the engine's record doesn't account for tokens {start} to {end}"
            )
        logprobs[start:end] = call.result.logprobs
    return logprobs


def _optional_number(value: Any, key: str, where: str) -> float | None:
    if value is None:
        return None
    number = finite_number(value)
    if number is None:
        raise AgentError(f'{where}: "{key}" is {value!r}; it must be one finite number (float, array or tensor)')
    return number


def _step_rewards(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(position), float(number)) for position, number in value or ())
    except (TypeError, ValueError) as error:
        raise AgentError(f'{where}: "step_rewards" must be (position, value) pairs, got {value!r}') from error


def _extra_logs(value: Any, where: str) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise AgentError(f'{where}: "extra_logs" is a {type(value).__name__}; return a dict of name to number')
    logs = {}
    for name, entry in value.items():
        number = as_number(as_list(entry)[0]) if as_list(entry) else None
        if number is None:
            raise AgentError(f"{where}: extra_logs[{name!r}] is {entry!r}, not a number")
        logs[str(name)] = number
    return logs
