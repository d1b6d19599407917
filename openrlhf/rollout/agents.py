"""Base classes for agent files (`--agent_func_path`). Users import them from `openrlhf.utils.agent`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openrlhf.rollout.agent_engine import AgentSamplingParams
from openrlhf.rollout.agent_output import CUT_TOKENS, warn_of_cut
from openrlhf.rollout.errors import AgentError
from openrlhf.rollout.protocol import PlacedImage
from openrlhf.rollout.rewards import RewardClient, RewardRequest, RewardResult, make_reward_source
from openrlhf.rollout.rewards.base import as_list, finite_number
from openrlhf.rollout.text import end_of_sequence_ids, reward_text
from openrlhf.rollout.usercode import run_in_thread
from openrlhf.utils.continued import continued_ids
from openrlhf.utils.first_ids import first_ids, last_ids
from openrlhf.utils.images import ImageError

_STEP_KEYS = (
    'Return {"rewards": number, "environment_feedback": text, "done": bool} and, if wanted, "scores", '
    '"extra_logs", "sampling_params", "environment_images".'
)


class AgentExecutorBase(ABC):
    """Runs one episode. Agent files define a subclass `AgentExecutor`, constructible without arguments."""

    @abstractmethod
    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Plays one episode; called with keyword arguments. Subclasses may leave out `images`.

        Args:
            prompt: prompt text, template applied.
            label: raw value of the label column.
            sampling_params: options named as in vLLM; a copy of this episode's own, free to change.
            max_length: limit of all tokens of the episode.
            hf_tokenizer: the tokenizer.
            llm_engine: ``await llm_engine.generate(prompt_token_ids, sampling_params)`` returns an object
                shaped like vLLM's RequestOutput.
            images: the prompt's images as PIL images, None where it has none. Their tokens are among
                ``llm_engine.prompt_token_ids``.

        Returns:
            A dict with "prompt", "label", "observation_tokens" (ids of the prompt and all turns),
            "action_ranges" ((start, end) token positions that the policy sampled), "rollout_log_probs" (a
            list as long as observation_tokens, or None), and optionally "reward", "scores", "truncated",
            "extra_logs", and "step_rewards" ((position, value) pairs).
        """


class AgentInstanceBase(ABC):
    """The environment of one episode, for `MultiTurnAgentExecutor`; every sample gets a new instance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - subclasses may leave it out
        """Called without arguments. An `async def __init__` is awaited."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Starts the episode.

        Args:
            states: {"observation": prompt text, "label": label}.

        Returns:
            A dict with "observation": the text that the first turn sees.
        """
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Answers one turn of the policy.

        Args:
            state_dict: "observation_text" (everything before this turn's action), "action_text", "label",
                "sampling_params" (its max_tokens is the limit of this turn; changes apply from the next turn on).

        Returns:
            A dict with "rewards" (number, array or tensor; summed over the turns), "environment_feedback"
            (text appended to the context, never trained on), "done", and optionally "scores" (the last one
            counts; default: sum of rewards), "extra_logs" (the last one counts), "sampling_params", and
            "environment_images" (a list; each takes the place of an "<image>" in the feedback).
        """


@dataclass
class Episode:
    """What an episode has gathered so far: one row of ids that grows turn by turn.

    Attributes:
        ids: tokens of the prompt and all turns.
        text: what they say.
        logprobs: 0 where the policy did not sample; None where nobody asked for them, or the engine gave none.
        ranges: start and end of each turn among the ids.
        cut_tokens: how many of the environment's did not fit.
    """

    ids: list[int]
    text: str
    logprobs: list[float] | None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    total_reward: float = 0.0
    score: Any = 0.0
    extra_logs: Any = None
    truncated: bool = False
    cut_tokens: int = 0
    images: list[PlacedImage] = field(default_factory=list)

    def output(self, prompt: str, label: Any) -> dict[str, Any]:
        """What `AgentExecutorBase.execute` returns, still without a verdict."""
        return {
            "prompt": prompt,
            "label": label,
            "reward": None,
            "scores": None,
            "observation_tokens": self.ids,
            "action_ranges": self.ranges,
            "rollout_log_probs": self.logprobs,
            "truncated": self.truncated,
            "extra_logs": self.extra_logs or {},
            "metadata": {CUT_TOKENS: self.cut_tokens} if self.cut_tokens else {},
        }

    def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Add tokens; without their log-probs, such as the policy did not sample."""
        self.ids.extend(ids)
        if self.logprobs is not None:
            self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)

    def take_turn(self, output: Any) -> None:
        """Add what the policy sampled, as the engine gave it."""
        start, logprobs = len(self.ids), None
        if output.logprobs is None:
            self.logprobs = None  # the engine's records decide whether that is an error
        else:
            logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        self.append(output.token_ids, logprobs)
        self.ranges.append((start, len(self.ids)))
        self.truncated = output.finish_reason == "length"


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Alternates between the policy and an environment until the environment says done or the room is used
    up.

    Ids that the policy sampled stay as they are; only the environment's text is encoded. All turns together may
    have `max_length` tokens, and a turn all the room that is left. `sampling_params.max_tokens`, as `execute` gets
    it, is the room that a long first observation leaves.

    Args:
        agent_instance_cls: subclass of AgentInstanceBase, constructible without arguments.
        max_turn_tokens: most tokens of one turn; None sets no limit.
    """

    def __init__(self, agent_instance_cls: type[AgentInstanceBase], max_turn_tokens: int | None = None) -> None:
        if not (inspect.isclass(agent_instance_cls) and issubclass(agent_instance_cls, AgentInstanceBase)):
            raise TypeError(
                "MultiTurnAgentExecutor needs a subclass of AgentInstanceBase (the class, not an "
                f"instance), got {agent_instance_cls!r}"
            )
        if max_turn_tokens is not None and max_turn_tokens < 1:
            raise ValueError(f"max_turn_tokens must be at least 1, or None for no limit; got {max_turn_tokens}")
        self.agent_instance_cls = agent_instance_cls
        self.max_turn_tokens = max_turn_tokens

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Plays one episode; see AgentExecutorBase.execute."""
        where = f"{getattr(llm_engine, 'name', 'sample')}: {self.agent_instance_cls.__name__}"
        agent = await self._new_instance()
        text = await self._first_observation(agent, prompt, label, where)
        episode = _begun(text, prompt, sampling_params, max_length, hf_tokenizer, llm_engine)
        if episode.cut_tokens:
            warn_of_cut(self.agent_instance_cls.__name__, "returned from reset()")
        sampling_params.max_tokens = None
        done = False
        while not done:
            room = max_length - len(episode.ids)
            if room <= 0:
                episode.truncated = True
                break
            sampling_params.max_tokens = self._turn_limit(sampling_params, room)
            action_text = await _sample_turn(episode, sampling_params, llm_engine)
            state = {
                "observation_text": episode.text,
                "action_text": action_text,
                "label": label,
                "sampling_params": sampling_params,
            }
            result = _checked_step(await _call(agent.step, state), where)
            feedback = result["environment_feedback"] or ""
            new = await _new_images(result.get("environment_images"), episode, llm_engine, where)
            if new:
                feedback = llm_engine.images.with_placeholders(feedback, len(new))
            done = _take_step(episode, result, action_text, feedback, where)
            _append_feedback(episode, feedback, new, max_length, hf_tokenizer, llm_engine, where)
            sampling_params = result.get("sampling_params") or sampling_params
        return {
            **episode.output(prompt, label),
            "reward": episode.total_reward,
            "scores": episode.score,
            "step_rewards": episode.step_rewards,
        }

    def _turn_limit(self, sampling_params: Any, room: int) -> int:
        # A SamplingParams of vLLM's own that an agent made has max_tokens 16 where nobody asked for a limit.
        asked = sampling_params.max_tokens if isinstance(sampling_params, AgentSamplingParams) else None
        return min([room, *(limit for limit in (asked, self.max_turn_tokens) if limit is not None)])

    async def _new_instance(self) -> AgentInstanceBase:
        cls = self.agent_instance_cls
        initialiser: Any = getattr(cls, "__init__")  # noqa: B009 - typed as Any on purpose
        if not inspect.iscoroutinefunction(initialiser):
            return cls()
        # Calling such a class raises TypeError, but files written for older releases have it.
        instance = cls.__new__(cls)
        await initialiser(instance)
        return instance

    async def _first_observation(self, agent: AgentInstanceBase, prompt: str, label: Any, where: str) -> str:
        states = await _call(agent.reset, {"observation": prompt, "label": label})
        if not isinstance(states, Mapping) or not isinstance(states.get("observation"), str):
            got = f"a dict with {sorted(map(str, states))}" if isinstance(states, Mapping) else type(states).__name__
            raise AgentError(f'{where}.reset() returned {got}; return a dict with "observation": text')
        return states["observation"]


class SingleTurnAgentExecutor(AgentExecutorBase):
    """Samples one response and asks a reward source for its reward.

    Args:
        remote_rm_url: .py file or URLs as for `--remote_rm_url`; None leaves the reward to a reward model.
    """

    def __init__(self, remote_rm_url: str | Sequence[str] | None = None) -> None:
        self.remote_rm_url = remote_rm_url
        self._rewards = RewardClient(make_reward_source(remote_rm_url)) if remote_rm_url else None

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Plays one episode; see AgentExecutorBase.execute."""
        episode = _begun(prompt, prompt, sampling_params, max_length, hf_tokenizer, llm_engine)
        if episode.cut_tokens:
            warn_of_cut(type(self).__name__, "took as the prompt")
        ids = list(episode.ids)
        await _sample_turn(episode, sampling_params, llm_engine)
        output = episode.output(prompt, label)
        if self._rewards is None:
            return output
        response = reward_text(hf_tokenizer, ids, episode.ids[len(ids) :], eos_ids=end_of_sequence_ids(hf_tokenizer))
        name = getattr(llm_engine, "name", "sample")
        verdict = await self._rewards.score(RewardRequest(prompt + response, prompt, label, {}, name))
        assert isinstance(verdict, RewardResult)  # the policy of this client is to raise
        output.update(reward=verdict.reward, scores=verdict.score, extra_logs=dict(verdict.extra_logs))
        return output


def _begun(
    text: str, prompt: str, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
) -> Episode:
    """An episode that has its first observation."""
    ids, placed, cut = _first_ids(text, prompt, sampling_params, max_length, hf_tokenizer, llm_engine)
    logprobs = [0.0] * len(ids) if sampling_params.logprobs is not None else None
    return Episode(ids, text, logprobs, images=placed, cut_tokens=cut)


def _first_ids(
    text: str, prompt: str, sampling_params: Any, max_length: int, hf_tokenizer: Any, llm_engine: Any
) -> tuple[list[int], list[PlacedImage], int]:
    """Ids of the first observation, cut behind BOS so that there is room for an answer; its images; tokens cut off."""
    known = getattr(llm_engine, "prompt_token_ids", None)
    placed = list(getattr(llm_engine, "placed", ()))
    if known and text == prompt and prompt == getattr(llm_engine, "prompt_text", None):
        return list(known), placed, 0
    ids = first_ids(hf_tokenizer, text, like=known or ())
    limit = max(1, max_length - (sampling_params.max_tokens or 1))
    if not placed:
        return last_ids(hf_tokenizer, ids, limit), [], max(0, len(ids) - limit)
    name = getattr(llm_engine, "name", "sample")
    try:
        ids, placed = llm_engine.images.place(ids, [image.data for image in placed])
    except ImageError as error:
        raise AgentError(f"{name}: the observation that reset() returned: {error}") from error
    if len(ids) > limit:
        raise AgentError(f"{name}: the observation has images and {len(ids)} tokens, the limit is {limit}")
    return ids, placed, 0


async def _new_images(value: Any, episode: Episode, llm_engine: Any, where: str) -> list[bytes]:
    """Contents of the images that an environment shows."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return []
    if getattr(llm_engine, "images", None) is None:
        raise AgentError(f'{where}.step() returned "environment_images", but --max_images_per_prompt is 0')
    try:
        return await llm_engine.images.read(value, already=len(episode.images))
    except ImageError as error:
        raise AgentError(f'{where}.step() returned "environment_images": {error}') from error


def _append_feedback(
    episode: Episode,
    feedback: str,
    images: Sequence[bytes],
    max_length: int,
    hf_tokenizer: Any,
    llm_engine: Any,
    where: str,
) -> None:
    """Adds what the environment said, as far as there is room; an image whole or not at all."""
    if not feedback:
        return
    ids = continued_ids(hf_tokenizer, feedback)
    placed: list[PlacedImage] = []
    if images:
        try:
            ids, placed = llm_engine.images.place(ids, images, len(episode.ids))
        except ImageError as error:
            raise AgentError(f'{where}.step() returned "environment_feedback": {error}') from error
    end = min([max_length, *(i.offset for i in placed if i.offset + i.length > max_length)])
    episode.images += [image for image in placed if image.offset < end]
    kept = ids[: end - len(episode.ids)]
    episode.append(kept)
    if len(kept) < len(ids):
        episode.cut_tokens += len(ids) - len(kept)
        warn_of_cut(where.rpartition(": ")[2], "returned from step()")


async def _sample_turn(episode: Episode, sampling_params: Any, llm_engine: Any) -> str:
    """Samples one turn into the episode and returns its text; the engine keeps to the room that is left."""
    data = {"multi_modal_data": {"image": list(episode.images)}} if episode.images else {}
    output = (await llm_engine.generate(list(episode.ids), sampling_params, **data)).outputs[0]
    episode.take_turn(output)
    return output.text


def _checked_step(result: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(result, Mapping):
        raise AgentError(f"{where}.step() returned {type(result).__name__}, not a dict. {_STEP_KEYS}")
    missing = [key for key in ("rewards", "environment_feedback", "done") if key not in result]
    if missing:
        raise AgentError(
            f"{where}.step() returned a dict without {missing} (keys: {sorted(map(str, result))}). {_STEP_KEYS}"
        )
    feedback = result["environment_feedback"]
    if feedback is not None and not isinstance(feedback, str):
        raise AgentError(
            f'{where}.step() returned "environment_feedback" of type {type(feedback).__name__}; it must be text'
        )
    return result


def _take_step(episode: Episode, result: Mapping[str, Any], action_text: str, feedback: str, where: str) -> bool:
    """Adds the environment's rewards and text to the episode; returns whether the episode is over."""
    reward = finite_number(result["rewards"])
    if reward is None:
        raise AgentError(f'{where}.step() returned "rewards" = {result["rewards"]!r}; it must be one finite number')
    episode.total_reward += reward
    start, end = episode.ranges[-1]
    if end > start:
        episode.step_rewards.append((end - 1, reward))
    episode.score = result["scores"] if result.get("scores") is not None else episode.total_reward
    episode.extra_logs = result.get("extra_logs")
    episode.text += action_text + feedback
    return bool(as_list(result["done"])[0])


async def _call(method: Callable[[dict[str, Any]], Any], argument: dict[str, Any]) -> Any:
    """Calls `reset` or `step`, in the episode's own task: what one opens (an MCP client), another may close.

    A plain function runs in a thread, so that it can't hold up other episodes.
    """
    value = method(argument) if inspect.iscoroutinefunction(method) else await run_in_thread(method, argument)
    return await value if inspect.isawaitable(value) else value
