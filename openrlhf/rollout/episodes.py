"""Running the episodes of one prompt, single-turn or with an agent; a group's samples side by side."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.rollout.agent_engine import AgentEngine, AgentSamplingParams, generate_checked
from openrlhf.rollout.agent_output import trajectory_from_agent_output
from openrlhf.rollout.errors import (
    AgentError,
    EpisodeTimeout,
    RolloutError,
    describe_exception,
    user_location,
)
from openrlhf.rollout.group import EpisodeFailure, Group, PromptItem
from openrlhf.rollout.images import PromptImages
from openrlhf.rollout.protocol import GenerationEngine, SamplingParams, Tokenizer
from openrlhf.rollout.rewards.base import RewardRequest
from openrlhf.rollout.rewards.client import NoReward, RewardClient
from openrlhf.rollout.sample import DynamicFilterOutput, Sample
from openrlhf.rollout.seeding import derive_seed
from openrlhf.rollout.text import continuation_text, end_of_sequence_ids, response_end, reward_text
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.rollout.usercode import DeadlinePassed, accepts_keyword, contained, gather_all, within
from openrlhf.utils.images import ImageError, decode_image

if TYPE_CHECKING:
    from openrlhf.rollout.agents import AgentExecutorBase

logger = logging.getLogger(__name__)

GroupFilter = Callable[[Sequence[Trajectory]], Awaitable[DynamicFilterOutput]]


@dataclass(frozen=True)
class EpisodeSpec:
    """What all episodes of a rollout have in common.

    Attributes:
        sampling: options for every sample; `max_tokens` limits one response; of a multi-turn agent it is the
            room that a long prompt leaves.
        max_length: limit of prompt + everything after it, in tokens.
        tokenizer: for the text that rewards and agents see.
        eos_token_ids: ids that end a sequence, besides the tokenizer's own.
        rewards: where samples without a reward get one; None leaves it to a reward model.
        group_reward: ask for the rewards of all samples of a prompt at once.
        group_filter: the user's judgement of each group of training; None keeps all.
        executor: agent that runs the episodes; None = single turn.
        prompt_limit: longest prompt in tokens; None = what `max_length` leaves for one response.
        seed: seed of the run; each request gets one of its own from it.
        episode_timeout: seconds for one episode, reward included; None = no limit.
        on_agent_failure: "raise" ends the rollout when agent code fails, "drop" leaves the sample out.
            Counted. The same goes for images that can't be read.
        images: how prompts have images; None where the model takes none.
        weight_version: of the engine's weights now; tokens that an agent sampled by other means count as theirs.
    """

    sampling: SamplingParams
    max_length: int
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int] = frozenset()
    rewards: RewardClient | None = None
    group_reward: bool = False
    group_filter: GroupFilter | None = None
    executor: AgentExecutorBase | None = None
    prompt_limit: int | None = None
    seed: int = 0
    episode_timeout: float | None = 1800.0
    on_agent_failure: str = "raise"
    images: PromptImages | None = None
    weight_version: int = 0

    def __post_init__(self) -> None:
        if self.longest_prompt < 1:
            raise ValueError(
                f"max_length {self.max_length} leaves no room for a prompt (max_tokens "
                f"{self.sampling.max_tokens}, prompt_limit {self.prompt_limit})"
            )

    @property
    def longest_prompt(self) -> int:
        """Longest prompt that leaves room for a response (for one token where max_tokens is unset)."""
        room = self.max_length - (self.sampling.max_tokens or 1)
        return room if self.prompt_limit is None else min(self.prompt_limit, self.max_length - 1)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a sequence."""
        return end_of_sequence_ids(self.tokenizer, self.eos_token_ids)

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Ids that end a response."""
        return self.eos_ids.union(sampling.stop_token_ids)


Outcome = Trajectory | EpisodeFailure


async def run_group(item: PromptItem, n: int, engine: GenerationEngine, spec: EpisodeSpec) -> Group:
    """Runs `n` episodes of one prompt side by side, and a greedy one if the prompt asks for it.

    Every sample keeps its own prompt, label and index, whatever the order of completion. Without the greedy
    response that they are compared with, samples are worth nothing: where that one is lost, so is the group.

    Raises:
        EngineError: the engine failed.
        AgentError: agent code failed and `on_agent_failure` is "raise".
        RewardError: no reward could be had and the reward client's policy is "stop".
        RolloutError: an image can't be read and `on_agent_failure` is "raise".
    """
    fitted_item = item
    if item.images:
        try:
            fitted_item = await _with_images(item, spec)
        except ImageError as error:
            message = f"prompt {item.prompt_id}: {error}"
            if spec.on_agent_failure == "raise":
                raise RolloutError(message) from error
            logger.warning("%s; its samples are lost", message)
            return _lost_group(item, n, "image", message)
    length = len(fitted_item.token_ids)
    if length == 0:
        raise RolloutError(f"prompt {item.prompt_id} has no tokens; drop empty prompts from the data")
    if length > spec.longest_prompt:  # texts were cut when they were read; half an image is none
        message = f"prompt {item.prompt_id} has {length} tokens, the limit is {spec.longest_prompt}"
        return _lost_group(item, n, "long_prompt", message)
    specs = [spec] * n + [replace(spec, sampling=_greedy(spec.sampling))] * item.greedy_baseline
    tasks = [asyncio.ensure_future(_guarded_episode(fitted_item, i, engine, own)) for i, own in enumerate(specs)]
    try:
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    baseline = outcomes[n][-1] if item.greedy_baseline else None
    if isinstance(baseline, EpisodeFailure):
        return Group(item, (), (baseline, *_failures(outcomes[:n])))
    samples = list(itertools.chain.from_iterable(outcomes[:n]))
    if spec.group_reward:
        samples = await _rewarded([t for t in samples if isinstance(t, Trajectory)], spec) + [*_failures(outcomes[:n])]
    finished = tuple(outcome for outcome in samples if isinstance(outcome, Trajectory))
    group = Group(item, finished, tuple(_failures([samples])), baseline=baseline)
    return group if item.evaluation or spec.group_filter is None else await _judged(group, spec.group_filter)


def _failures(outcomes: Iterable[Sequence[Outcome]]) -> list[EpisodeFailure]:
    return [outcome for own in outcomes for outcome in own if isinstance(outcome, EpisodeFailure)]


async def _judged(group: Group, group_filter: GroupFilter) -> Group:
    """The group with the filter's verdict; lost where the filter fails."""
    if not group.trajectories:
        return group
    try:
        return replace(group, verdict=await group_filter(group.trajectories))
    except RolloutError as error:
        message = f"prompt {group.item.prompt_id}: {error}"
        logger.warning("group lost: %s", message)
        lost = tuple(EpisodeFailure(t.prompt_id, t.sample_index, "filter", message) for t in group.trajectories)
        return replace(group, trajectories=(), failures=(*group.failures, *lost))


async def _rewarded(samples: Sequence[Trajectory], spec: EpisodeSpec, left: float | None = None) -> list[Outcome]:
    """The samples with their rewards. Those that have one keep it; of a group all are shown to the reward.

    Args:
        left: seconds that are left of the episode's time, where there is a limit.
    """
    missing = [t for t in samples if t.reward is None]
    if spec.rewards is None or not missing:
        return list(samples)
    started = time.monotonic()
    requests = [RewardRequest.of(t) for t in (samples if spec.group_reward else missing)]
    if spec.group_reward:
        verdicts = await spec.rewards.score_group(requests)
    else:
        verdicts = await gather_all([spec.rewards.score(request, left) for request in requests])
    seconds = time.monotonic() - started
    outcomes: dict[int, Outcome] = {id(t): t for t in samples}
    for request, verdict in zip(requests, verdicts, strict=True):
        t = request.trajectory
        assert t is not None
        if isinstance(verdict, NoReward):
            outcomes[id(t)] = EpisodeFailure(t.prompt_id, t.sample_index, "reward", verdict.reason)
        elif t.reward is None:
            logs, timings = {**t.extra_logs, **verdict.extra_logs}, {**t.timings, "reward": seconds}
            outcomes[id(t)] = replace(t, reward=verdict.reward, score=verdict.score, extra_logs=logs, timings=timings)
    return list(outcomes.values())


def _lost_group(item: PromptItem, n: int, kind: str, message: str) -> Group:
    return Group(item, (), tuple(EpisodeFailure(item.prompt_id, index, kind, message) for index in range(n)))


async def _with_images(item: PromptItem, spec: EpisodeSpec) -> PromptItem:
    """The prompt with its images read and their tokens in place."""
    if spec.images is None:
        raise ImageError("there are images, but --max_images_per_prompt is 0")
    ids, placed = spec.images.place(item.token_ids, await spec.images.read(item.images))
    return replace(item, token_ids=ids, placed=tuple(placed))


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, logprobs=False)


def sample_name(item: PromptItem, index: int) -> str:
    """Name of one sample in messages."""
    return f"prompt {item.prompt_id} sample {index}"


async def _guarded_episode(item: PromptItem, index: int, engine: GenerationEngine, spec: EpisodeSpec) -> list[Outcome]:
    """Runs one episode within its time limit, with its reward unless that is the group's; applies the failure policy.

    What the reward client says of a reward that comes too late holds as for any other failure.
    """
    started, limit = time.monotonic(), spec.episode_timeout
    strict = spec.on_agent_failure == "raise"
    try:
        play = _single_turn_episode if spec.executor is None else _agent_episode
        samples = await within(play(item, index, engine, spec), limit)
    except DeadlinePassed as error:
        what = "the episode" if spec.executor is None else f"agent {_title(spec.executor)}"
        message = f"{sample_name(item, index)}: {what} did not end within {limit:g} s"
        kind = "timeout"
        if strict or spec.executor is None:
            raise EpisodeTimeout(message) from error
    except AgentError as error:
        message, kind = str(error), "agent"
        if strict:
            raise
    else:
        if spec.group_reward:
            return list(samples)
        left = None if limit is None else max(0.0, started + limit - time.monotonic())
        return await _rewarded(samples, spec, left)
    logger.warning("sample lost after %.1f s: %s", time.monotonic() - started, message)
    return [EpisodeFailure(item.prompt_id, index, kind, message)]


def _sample_sampling(item: PromptItem, index: int, spec: EpisodeSpec) -> SamplingParams:
    seed = derive_seed(spec.seed, item.epoch, item.prompt_id, index)
    # The engine may know fewer end-of-sequence ids than the model has.
    stops = spec.sampling.stop_token_ids
    if not spec.sampling.ignore_eos and len(spec.eos_ids) > 1:
        others = spec.eos_ids - {spec.tokenizer.eos_token_id}
        stops = tuple(dict.fromkeys((*stops, *sorted(others))))
    return replace(spec.sampling, seed=seed, stop_token_ids=stops)


async def _single_turn_episode(
    item: PromptItem, index: int, engine: GenerationEngine, spec: EpisodeSpec
) -> list[Trajectory]:
    """One sample without its reward."""
    name = sample_name(item, index)
    prompt = list(item.token_ids)
    sampling = _sample_sampling(item, index, spec)
    room = spec.max_length - len(prompt)
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    sampling = replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))
    started = time.monotonic()
    result = await generate_checked(engine, prompt, sampling, item.placed, name)
    response = list(result.token_ids)
    end = response_end(response, result.finish_reason, spec.stop_ids(sampling), sampling.ignore_eos)
    total, actions = len(prompt) + len(response), slice(len(prompt), len(prompt) + end.length)
    mask = np.zeros(total, dtype=np.bool_)
    mask[actions] = True
    versions = np.full(total, -1, dtype=np.int32)
    versions[actions] = np.broadcast_to(result.weight_version, len(response))[: end.length]
    logprobs = None
    if sampling.logprobs and result.logprobs is not None:
        logprobs = np.zeros(total, dtype=np.float32)
        logprobs[actions] = result.logprobs[: end.length]
    text = reward_text(spec.tokenizer, prompt, response[: end.length], eos_ids=spec.eos_ids)
    trajectory = Trajectory(
        prompt_id=item.prompt_id,
        group_id=item.group_id,
        sample_index=index,
        token_ids=np.array([*prompt, *response], dtype=np.int32),
        action_mask=mask,
        logprobs=logprobs,
        weight_version=versions,
        finish_reason=end.finish_reason,
        truncated=end.truncated,
        metadata={**item.metadata, "prompt": item.text, "label": item.label, "response": text},
        timings={"generation": time.monotonic() - started},
        images=item.placed,
    )
    return [trajectory]


async def _agent_episode(item: PromptItem, index: int, engine: GenerationEngine, spec: EpisodeSpec) -> list[Trajectory]:
    """The sample of an episode, or the parts of one, without a reward that is not the agent's."""
    executor = spec.executor
    assert executor is not None
    name = sample_name(item, index)
    sampling = _sample_sampling(item, index, spec)
    agent_engine = AgentEngine(
        engine,
        spec.tokenizer,
        max_length=spec.max_length,
        logprobs=spec.sampling.logprobs,
        seed=sampling.seed,
        prompt_text=item.text,
        prompt_token_ids=item.token_ids,
        name=name,
        images=spec.images,
        placed=item.placed,
    )
    arguments: dict[str, Any] = {
        "prompt": item.text,
        "label": item.label,
        "sampling_params": AgentSamplingParams.from_sampling(sampling),
        "max_length": spec.max_length,
        "hf_tokenizer": spec.tokenizer,
        "llm_engine": agent_engine,
    }
    # Executors written for 0.9.x don't know this argument, those for 0.11.x may insist on it.
    if accepts_keyword(executor.execute, "images"):
        arguments["images"] = [decode_image(image.data) for image in item.placed] or None
    named = inspect.signature(executor.execute).parameters
    more = {"sample": _new_sample(item, index), "metadata": dict(item.metadata), "evaluation": item.evaluation}
    arguments.update({key: value for key, value in more.items() if key in named})
    started = time.monotonic()
    try:
        output: Any = await contained(executor.execute(**arguments))
        if agent_engine.engine_error is not None:
            raise agent_engine.engine_error
        parts = output if isinstance(output, list) and output else [output]
        trajectories = [
            trajectory_from_agent_output(
                part,
                prompt_id=item.prompt_id,
                group_id=item.group_id,
                sample_index=index,
                calls=agent_engine.calls,
                max_length=spec.max_length,
                weight_version=spec.weight_version,
                want_logprobs=spec.sampling.logprobs,
                metadata={**item.metadata, **_metadata_of(part), "prompt": item.text, "label": item.label},
                where=f"{name}: {_title(executor)}",
            )
            for part in (parts[-1:] if item.evaluation else parts)
        ]
    except Exception as error:
        if agent_engine.engine_error is not None:
            raise agent_engine.engine_error from error
        if isinstance(error, RolloutError):
            raise
        place = user_location(error, _source_file(executor))
        raise AgentError(f"{name}: {_title(executor)} raised {describe_exception(error)} at {place}") from error
    seconds = time.monotonic() - started
    return [_with_response(trajectory, spec.tokenizer, seconds) for trajectory in trajectories]


def _with_response(trajectory: Trajectory, tokenizer: Tokenizer, seconds: float) -> Trajectory:
    ids, start = trajectory.token_ids.tolist(), trajectory.prompt_length
    response = continuation_text(tokenizer, ids[:start], ids[start:])
    return replace(trajectory, timings={"episode": seconds}, metadata={**trajectory.metadata, "response": response})


def _new_sample(item: PromptItem, index: int) -> Sample:
    return Sample(
        index=index,
        group_index=item.group_id,
        prompt_id=item.prompt_id,
        prompt=item.text,
        label=item.label,
        metadata=copy.deepcopy(dict(item.metadata)),
        tokens=list(item.token_ids),
    )


def _metadata_of(output: Any) -> Mapping[str, Any]:
    own = output.get("metadata") if isinstance(output, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _title(executor: AgentExecutorBase) -> str:
    """What messages call the code of an agent."""
    return getattr(executor, "title", f"{type(executor).__name__}.execute()")


def _source_file(executor: AgentExecutorBase) -> str | None:
    """The user's file: where the executor's environment or the executor itself is defined."""
    if hasattr(executor, "source"):
        return executor.source
    try:
        return inspect.getsourcefile(getattr(executor, "agent_instance_cls", type(executor)))
    except TypeError:
        return None
