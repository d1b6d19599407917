"""Single-turn episodes: ids, masks, ends of responses, reward text, order, seeds, limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import idle_clock
import numpy as np
import pytest
from rollout_helpers import ANS, EOS, EOS2, PAD, LetterTokenizer, ScriptedEngine, item

from openrlhf.rollout import episodes
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import EngineError, EpisodeTimeout, RewardError, RolloutError
from openrlhf.rollout.group import Group
from openrlhf.rollout.protocol import GenerationResult, SamplingParams
from openrlhf.rollout.rewards import FunctionReward, RewardClient
from openrlhf.rollout.seeding import derive_seed

TOK = LetterTokenizer()


def spec(**options: Any) -> EpisodeSpec:
    sampling = options.pop("sampling", SamplingParams(max_tokens=4))
    return EpisodeSpec(sampling=sampling, max_length=options.pop("max_length", 16), tokenizer=TOK, **options)


def run(prompt: Any, n: int, engine: ScriptedEngine, episode_spec: EpisodeSpec) -> Group:
    return asyncio.run(run_group(prompt, n, engine, episode_spec))


def rewards_of(function: Any, **options: Any) -> RewardClient:
    return RewardClient(FunctionReward(function), **options)


def test_truncated_response_keeps_its_sampled_ids_and_log_probs() -> None:
    engine = ScriptedEngine([GenerationResult([11, 12, 13, 14], [-0.1, -0.2, -0.3, -0.4], "length", 5)])
    group = run(item(TOK, "ca"), 1, engine, spec(sampling=SamplingParams(max_tokens=4, logprobs=True)))
    trajectory = group.trajectories[0]
    assert trajectory.token_ids.tolist() == [*TOK.encode("ca"), 11, 12, 13, 14]
    assert trajectory.action_mask.tolist() == [False, False, True, True, True, True]
    assert trajectory.logprobs is not None
    np.testing.assert_array_equal(trajectory.logprobs, np.float32([0, 0, -0.1, -0.2, -0.3, -0.4]))
    assert trajectory.weight_version.tolist() == [-1, -1, 5, 5, 5, 5]
    assert trajectory.truncated and trajectory.finish_reason == "length"


@pytest.mark.parametrize(
    ("response", "reason", "mask", "truncated"),
    [
        ([14, EOS2, 15], "length", [True, True, False], False),
        ([14, 15, 16], "length", [True, True, True], True),
        ([EOS], "stop", [True], False),
    ],
)
def test_every_end_of_sequence_id_ends_a_response(
    response: list[int], reason: str, mask: list[bool], truncated: bool
) -> None:
    engine = ScriptedEngine([(response, reason)])
    options = spec(eos_token_ids=frozenset({EOS, EOS2}), sampling=SamplingParams(max_tokens=3))
    trajectory = run(item(TOK, "c"), 1, engine, options).trajectories[0]
    assert trajectory.token_ids[1:].tolist() == response
    assert trajectory.action_mask[1:].tolist() == mask
    assert trajectory.truncated is truncated
    assert engine.sampling[0].stop_token_ids == (EOS2,)


def test_with_ignore_eos_nothing_is_cut() -> None:
    engine = ScriptedEngine([([EOS, 14, EOS], "length")])
    trajectory = run(
        item(TOK, "c"),
        1,
        engine,
        spec(eos_token_ids=frozenset({EOS, EOS2}), sampling=SamplingParams(max_tokens=3, ignore_eos=True)),
    ).trajectories[0]
    assert trajectory.response_length == 3 and trajectory.truncated
    assert engine.sampling[0].stop_token_ids == ()


def test_versions_per_token_are_kept() -> None:
    engine = ScriptedEngine([GenerationResult([14, 15, EOS], None, "stop", [3, 3, 4])])
    trajectory = run(item(TOK, "c"), 1, engine, spec()).trajectories[0]
    assert trajectory.weight_version.tolist() == [-1, 3, 3, 4]
    assert trajectory.min_version == 3
    assert trajectory.logprobs is None


def test_reward_text_has_markers_but_no_padding() -> None:
    seen: list[str] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        seen.extend([*queries, *prompts])
        return [1.0] * len(queries)

    response = [ANS, *TOK.encode("ok"), EOS, PAD, PAD]
    options = spec(rewards=rewards_of(reward_func), sampling=SamplingParams(max_tokens=6))
    trajectory = run(item(TOK, "q?"), 1, ScriptedEngine([(response, "stop")]), options).trajectories[0]
    assert seen == ["q?" + "<ans>ok<eos>", "q?"]
    assert trajectory.metadata["response"] == "<ans>ok<eos>"


def test_padding_inside_a_response_never_reaches_a_reward() -> None:
    queries: list[str] = []

    def reward_func(texts: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        queries.extend(texts)
        return [1.0] * len(texts)

    engine = ScriptedEngine([([PAD, 14, PAD, EOS], "stop")])
    run(item(TOK, "q"), 1, engine, spec(rewards=rewards_of(reward_func)))
    assert queries == ["qe<eos>"]


def test_samples_keep_prompt_and_label_whatever_the_order_of_completion() -> None:
    table = {("p", 0): 0.0, ("p", 1): 1.0, ("q", 0): 5.0, ("q", 1): 9.0}
    seen: list[tuple[str, int]] = []

    async def reward_func(queries: list[str], prompts: list[str], labels: list[int], **kwargs: Any) -> Any:
        facts = kwargs["metadata"]
        seen.extend(zip(prompts, labels, strict=True))
        return {"rewards": [table[p, f["sample_index"]] for p, f in zip(prompts, facts, strict=True)]}

    async def both() -> list[Group]:
        # The first prompt's engine answers last, and within a group the last sample answers first.
        options = spec(rewards=rewards_of(reward_func))
        slow = ScriptedEngine([[14, EOS], [15, EOS]], delays=[0.08, 0.06])
        fast = ScriptedEngine([[14, EOS], [15, EOS]], delays=[0.04, 0.02])
        return await asyncio.gather(
            run_group(item(TOK, "p", 1, label=1), 2, slow, options),
            run_group(item(TOK, "q", 2, label=5), 2, fast, options),
        )

    groups = asyncio.run(both())
    assert [(t.prompt_id, t.sample_index, t.reward) for g in groups for t in g.trajectories] == [
        (1, 0, 0.0),
        (1, 1, 1.0),
        (2, 0, 5.0),
        (2, 1, 9.0),
    ]
    assert [t.group_id for g in groups for t in g.trajectories] == [101, 101, 102, 102]
    assert seen == [("q", 5), ("q", 5), ("p", 1), ("p", 1)]
    advantages = [[t.reward - np.mean([u.reward for u in g.trajectories]) for t in g.trajectories] for g in groups]
    assert advantages == [[-0.5, 0.5], [-2.0, 2.0]]


def test_seeds_come_from_seed_epoch_prompt_and_index() -> None:
    def seeds(prompt_id: int, epoch: int, seed: int) -> list[int | None]:
        engine = ScriptedEngine(lambda ids, sampling: [EOS])
        run(item(TOK, "p", prompt_id, epoch=epoch), 2, engine, spec(seed=seed))
        return [sampling.seed for sampling in engine.sampling]

    first = seeds(4, 0, 1)
    assert first == seeds(4, 0, 1) == [derive_seed(1, 0, 4, 0), derive_seed(1, 0, 4, 1)]
    everything = [*first, *seeds(5, 0, 1), *seeds(4, 1, 1), *seeds(4, 0, 2)]
    assert len(set(everything)) == 8
    assert all(0 <= seed < 2**63 for seed in everything if seed is not None)


def test_derived_seeds_never_change() -> None:
    assert derive_seed(42, 0, 7, 3) == 4786267711923919146


def test_sampling_defaults_are_neutral() -> None:
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert sampling.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_k": -2}, "top_k -2"),
        ({"min_p": 2.0}, "min_p 2.0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"min_tokens": -1}, "min_tokens -1"),
    ],
)
def test_bad_sampling_parameters_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


def test_a_prompt_that_leaves_no_room_for_a_response_is_lost() -> None:
    engine = ScriptedEngine([])
    group = run(item(TOK, "abcdefghijklmnop", 3), 2, engine, spec(max_length=10))
    assert not group.trajectories and [f.kind for f in group.failures] == ["long_prompt"] * 2
    assert "prompt 3 has 15 tokens, the limit is 6" in group.failures[0].message
    assert engine.prompts == []


def test_the_response_never_passes_max_length() -> None:
    engine = ScriptedEngine(lambda ids, sampling: [14] * 99)
    options = spec(max_length=10, prompt_limit=8, sampling=SamplingParams(max_tokens=4, min_tokens=3))
    group = run(item(TOK, "cdefghij"), 1, engine, options)
    assert engine.sampling[0].max_tokens == 2 and engine.sampling[0].min_tokens == 2
    assert group.trajectories[0].total_length == 10 and group.trajectories[0].truncated
    engine = ScriptedEngine(lambda ids, sampling: [14] * 99)
    run(item(TOK, "cdef"), 1, engine, spec(max_length=10, sampling=SamplingParams()))
    assert engine.sampling[0].max_tokens == 6


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (RuntimeError("out of memory"), "generation engine failed: RuntimeError: out of memory"),
        (GenerationResult([], None, "abort"), "returned no tokens"),
        (GenerationResult([14], [0.0], "error"), "ended with finish_reason 'error'"),
        (GenerationResult([14], None, "stop"), "no log-probabilities, which were asked for"),
        (GenerationResult([14], [0.0, 0.0], "stop"), "2 log-probabilities for 1 tokens"),
        (GenerationResult([14], [0.0], "stop", [1, 2]), "2 weight versions for 1 tokens"),
        (GenerationResult([14] * 5, [0.0] * 5, "stop"), "5 tokens, max_tokens was 4"),
    ],
)
def test_engine_trouble_is_named_with_the_sample(reply: Any, words: str) -> None:
    options = spec(sampling=SamplingParams(max_tokens=4, logprobs=True))
    with pytest.raises(EngineError, match=words) as caught:
        run(item(TOK, "p", 5), 1, ScriptedEngine([reply]), options)
    assert "prompt 5 sample 0" in str(caught.value)


@pytest.mark.parametrize("policy", ["raise", "drop"])
def test_an_engine_that_hangs_ends_with_a_named_timeout(policy: str) -> None:
    engine = ScriptedEngine([[EOS]], delays=[60])
    with pytest.raises(EpisodeTimeout, match=r"prompt 5 sample 0: the episode did not end within 0.1 s"):
        run(item(TOK, "p", 5), 1, engine, spec(episode_timeout=0.1, on_agent_failure=policy))


def test_what_ends_a_group_ends_its_other_requests_too() -> None:
    ended: list[int] = []

    class Engine(ScriptedEngine):
        async def generate(self, prompt_token_ids: list[int], sampling: SamplingParams) -> GenerationResult:
            try:
                return await super().generate(prompt_token_ids, sampling)
            except asyncio.CancelledError:
                ended.append(len(self.prompts))
                raise

    async def both() -> None:
        engine = Engine([[EOS], RuntimeError("gone"), [EOS]], delays=[60, 0, 60])
        with pytest.raises(EngineError, match="gone"):
            await run_group(item(TOK, "p"), 3, engine, spec())
        async with asyncio.timeout(30):
            while len(ended) < 2:
                await asyncio.sleep(0)

    asyncio.run(both())


@pytest.mark.parametrize("policy", ["stop", "drop", "zero"])
def test_a_reward_that_takes_all_of_the_time_is_one_that_failed(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --reward_on_failure says holds for it, and only an engine that hangs ends a run in any case."""

    async def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
        if "f" in queries[0]:
            await asyncio.sleep(60)
        return [1.0] * len(queries)

    # On a busy machine the other two samples may need that long, too.
    monkeypatch.setattr(episodes, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))

    def run(*arguments: Any) -> Group:
        return idle_clock.run(run_group(*arguments))

    engine = ScriptedEngine([[14, EOS], [15, EOS], [16, EOS]])
    rewards = rewards_of(reward_func, on_failure=policy, batch_size=1)
    options = spec(rewards=rewards, episode_timeout=0.2, on_agent_failure="raise" if policy == "stop" else "drop")
    message = r"prompt 5 sample 1: no reward in the 0\.\d s that were left of its episode's time \(--rollout_timeout\)"
    if policy == "stop":
        with pytest.raises(RewardError, match=message):
            run(item(TOK, "p", 5), 3, engine, options)
        return
    group = run(item(TOK, "p", 5), 3, engine, options)
    kept = {t.sample_index: (t.reward, "reward_failed" in t.extra_logs) for t in group.trajectories}
    assert kept == {0: (1.0, False), 2: (1.0, False)} | ({1: (0.0, True)} if policy == "zero" else {})
    assert [(f.sample_index, f.kind) for f in group.failures] == ([(1, "reward")] if policy == "drop" else [])
    metrics = rewards.pop_metrics()
    assert metrics["reward/failures"] == 1 and metrics["reward/dropped" if policy == "drop" else "reward/zeroed"] == 1


def test_a_dropped_reward_leaves_the_other_samples() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
        return [float("nan") if "f" in q else 1.0 for q in queries]

    engine = ScriptedEngine([[14, EOS], [15, EOS], [16, EOS]])
    group = run(item(TOK, "p", 5), 3, engine, spec(rewards=rewards_of(reward_func, on_failure="drop")))
    assert [t.sample_index for t in group.trajectories] == [0, 2]
    assert [(f.sample_index, f.kind) for f in group.failures] == [(1, "reward")]
    assert "nan" in group.failures[0].message and "prompt 5 sample 1" in group.failures[0].message


def test_a_greedy_response_is_rewarded_and_kept_apart() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        return [float(query.count("f")) for query in queries]

    def reply(prompt: list[int], sampling: SamplingParams) -> list[int]:
        return [15, 15, EOS] if sampling.temperature == 0 else [15, EOS]

    engine = ScriptedEngine(reply)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=4, logprobs=True)
    prompt = item(TOK, "c", greedy_baseline=True)
    group = run(prompt, 2, engine, spec(sampling=sampling, rewards=rewards_of(reward_func)))
    assert [(t.sample_index, t.reward) for t in group.trajectories] == [(0, 1.0), (1, 1.0)]
    assert all(t.logprobs is not None for t in group.trajectories)
    assert group.baseline is not None and group.baseline.reward == 2.0
    used = engine.sampling[2]
    assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.0, 1.0, -1, 0.0)
    assert engine.sampling[0].temperature == 0.7
    assert run(item(TOK, "c"), 2, ScriptedEngine(reply), spec()).baseline is None


def test_a_group_whose_greedy_response_is_lost_is_lost_and_told_once() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        return [float("nan") if query.count("f") == 2 else 1.0 for query in queries]

    engine = ScriptedEngine(lambda prompt, sampling: [15, 15, EOS] if sampling.temperature == 0 else [15, EOS])
    rewards = rewards_of(reward_func, on_failure="drop")
    group = run(item(TOK, "c", greedy_baseline=True), 2, engine, spec(rewards=rewards))
    assert group.trajectories == () and group.baseline is None
    assert [(f.sample_index, f.kind) for f in group.failures] == [(2, "reward")]


def test_without_its_greedy_response_a_group_is_lost() -> None:
    def reward_func(queries: list[str], prompts: list[str], labels: list[str], metadata: Any) -> list[float]:
        if metadata[0]["sample_index"] == 2:
            raise ValueError("no")
        return [1.0]

    client = rewards_of(reward_func, on_failure="drop", batch_size=1)
    engine = ScriptedEngine([[14, EOS]] * 3)
    group = run(item(TOK, "c", greedy_baseline=True), 2, engine, spec(rewards=client))
    assert group.trajectories == () and group.baseline is None
    assert [(f.kind, f.sample_index) for f in group.failures] == [("reward", 2)]


def test_without_a_reward_source_rewards_stay_open() -> None:
    trajectory = run(item(TOK, "p"), 1, ScriptedEngine([[EOS]]), spec()).trajectories[0]
    assert trajectory.reward is None and trajectory.score is None


def test_unusable_specs_and_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="max_length 4 leaves no room for a prompt"):
        spec(max_length=4)
    with pytest.raises(RolloutError, match="prompt 0 has no tokens"):
        run(replace(item(TOK, "p"), token_ids=[]), 1, ScriptedEngine([]), spec())
