"""Hooks: found and checked at the start, what they get, what becomes of what they return, and of their mistakes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_helpers import EOS, LetterTokenizer, ScriptedEngine, item

from openrlhf.config import PPOConfig
from openrlhf.rollout.buffer import RolloutBuffer
from openrlhf.rollout.dump import RolloutDumpWriter, read_rollout_dump
from openrlhf.rollout.episodes import EpisodeSpec, run_group
from openrlhf.rollout.errors import AgentError, NoLearnableGroups, RewardError
from openrlhf.rollout.filters import CustomFilter, GroupCollector
from openrlhf.rollout.group import EVAL_EPOCH, Group
from openrlhf.rollout.hooks import BufferFilter, GenerateFunction, HookError, SampleReward, judge_group, load_hook
from openrlhf.rollout.metrics import rollout_metrics
from openrlhf.rollout.protocol import SamplingParams
from openrlhf.rollout.rewards import RewardClient
from openrlhf.rollout.sample import DynamicFilterOutput, Sample

TOK = LetterTokenizer()
EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples/python/hooks.py")
ARGS = PPOConfig(max_len=24)


def text(line: str) -> list[int]:
    return [*TOK.encode(line), EOS]


def play(
    replies: Any,
    n: int = 1,
    *,
    generate: Any = None,
    rm: Any = None,
    group_rm: bool = False,
    keep: Any = None,
    on_failure: str = "drop",
    args: PPOConfig = ARGS,
    label: Any = "4",
    sampling: SamplingParams | None = None,
    **facts: Any,
) -> Group:
    """A group of `n` samples of the prompt "2+2=" with these hooks."""
    args = replace(args, group_rm=group_rm)
    client = None if rm is None else RewardClient(SampleReward(rm, args), on_failure=on_failure, batch_size=1)
    spec = EpisodeSpec(
        sampling=sampling or SamplingParams(logprobs=True),
        max_length=args.max_len,
        tokenizer=TOK,
        rewards=client,
        group_reward=group_rm,
        group_filter=None if keep is None else partial(judge_group, keep, args),
        executor=None if generate is None else GenerateFunction(generate, args),
        on_agent_failure="raise" if on_failure == "stop" else "drop",
    )
    return asyncio.run(run_group(item(TOK, "2+2=", 7, label, **facts), n, ScriptedEngine(replies), spec))


def example(flag: str, name: str) -> Any:
    return load_hook(flag, f"{EXAMPLES}:{name}")


# --- found and checked


def test_a_function_is_found_in_a_file_or_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/rewards.py").write_text("RUNS = []\nRUNS.append(1)\ndef rm(args, sample): return 1.0\nrm2 = rm\n")
    monkeypatch.chdir(tmp_path)
    assert load_hook("custom_rm_path", "pack.rewards.rm")(None, None) == 1.0
    first = load_hook("custom_rm_path", "pack/rewards.py:rm")
    again = load_hook("custom_rm_path", str(tmp_path / "pack/rewards.py:rm2"))
    assert first is again  # several hooks of a file share one run of it


@pytest.mark.parametrize(
    ("flag", "body", "path", "message"),
    [
        ("custom_rm_path", "", "h.py", "write path/to/file.py:function or package.module.function. Wanted: def rm"),
        ("custom_rm_path", "", "nothing", "write path/to/file.py:function"),
        ("custom_rm_path", "", "gone.py:rm", "gone.py: no such file"),
        ("custom_rm_path", "", "h.py:rm", r"--custom_rm_path h.py:rm: there is no rm in h.py. Wanted: def rm\("),
        ("custom_rm_path", "rm = 3", "h.py:rm", "rm in h.py is no function"),
        ("custom_rm_path", "\nx = 1 / 0", "h.py:rm", r"ZeroDivisionError: division by zero \(at .*h.py:2\)"),
        ("custom_rm_path", "def rm(sample): ...", "h.py:rm", r"h.py:1 rm\(\) can't be called: too many positional"),
        ("custom_rm_path", "def rm(a, b, c): ...", "h.py:rm", "missing a required argument: 'c'"),
        ("custom_rm_path", "", "no.such.rm", "no.such can't be imported: ModuleNotFoundError: No module named 'no'"),
        ("dynamic_sampling_filter_path", "def f(a): ...", "h.py:f", r"Wanted: def keep\(args, samples\)"),
        ("buffer_filter_path", "def f(a, b): ...", "h.py:f", r"Wanted: def select\(args, groups, count\)"),
        ("custom_generate_function_path", "def g(a, s, p): ...", "h.py:g", "must be `async def`"),
        ("custom_generate_function_path", "async def g(a, s, p, *, x): ...", "h.py:g", "argument: 'x'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_the_signature_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, body: str, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").write_text(body)
    with pytest.raises(HookError, match=message):
        load_hook(flag, path)


# --- generate


def test_the_example_tries_twice_and_is_trained_on_what_was_sampled() -> None:
    group = play([text("5"), text("4")], generate=example("custom_generate_function_path", "generate"),
                 rm=example("custom_rm_path", "reward"))  # fmt: skip
    (sample,) = group.trajectories
    assert sample.token_ids.tolist() == [*TOK.encode("2+2="), *text("5"), *TOK.encode("?="), *text("4")]
    assert sample.action_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2
    assert sample.logprobs is not None and np.array_equal(sample.logprobs != 0, sample.action_mask)
    assert set(sample.weight_version[sample.action_mask].tolist()) == {3}
    assert (sample.reward, sample.score, sample.extra_logs) == (1.0, 1.0, {"attempts": 2})
    assert sample.metadata["response"] == "5<eos>?=4<eos>"


def test_a_reward_set_by_the_function_is_kept_and_evaluation_is_told() -> None:
    seen: list[bool] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any, evaluation: bool) -> Sample:
        seen.append(evaluation)
        sample.append([14], sampled=True)
        sample.reward = {"reward": 0.5, "score": 2.0, "luck": 3, "why": "text"}
        sample.status = Sample.Status.TRUNCATED
        sample.metadata["note"] = sample.metadata.pop("level")
        return sample

    for epoch in (0, EVAL_EPOCH):
        # Without the engine there are no log-probs to record.
        (sample,) = play([], generate=generate, rm=lambda a, s: 9.0, metadata={"level": [1]}, epoch=epoch,
                         sampling=SamplingParams()).trajectories  # fmt: skip
        assert (sample.reward, sample.score, sample.extra_logs) == (0.5, 2.0, {"luck": 3.0})
        assert sample.truncated and sample.metadata["note"] == [1]
    assert seen == [False, True]


async def fan_out(args: Any, sample: Sample, sampling_params: Any, llm_engine: Any) -> list[Sample]:
    parts = []
    for number in range(2):
        part = replace(sample, metadata={**sample.metadata, "part": number})
        part.append((await llm_engine.generate(part.tokens, sampling_params)).outputs[0].token_ids, sampled=True)
        parts.append(part)
    return parts


def test_parts_of_a_rollout_are_samples_of_the_group_and_evaluation_takes_the_last() -> None:
    rm = example("custom_rm_path", "reward")
    replies: list[Any] = [(TOK.encode("4"), "length"), text("5"), text("6"), text("4")]
    group = play(lambda ids, s: replies.pop(0), 2, generate=fan_out, rm=rm)
    assert sum(t.truncated for t in group.trajectories) == 1
    assert len(group.trajectories) == 4 and not group.failures
    assert sorted(t.sample_index for t in group.trajectories) == [0, 0, 1, 1]
    assert sorted(t.metadata["part"] for t in group.trajectories) == [0, 0, 1, 1]
    assert sum(t.reward == 1.0 for t in group.trajectories) == 2
    replies[:] = [text("4"), text("5")]
    (last,) = play(lambda ids, s: replies.pop(0), generate=fan_out, rm=rm, epoch=EVAL_EPOCH).trajectories
    assert last.metadata["part"] == 1 and last.reward == pytest.approx(0.1)


def test_parts_whose_rewards_fail_are_all_left_out_and_counted() -> None:
    async def rm(args: Any, sample: Sample) -> float:
        raise ConnectionError(f"no judge for part {sample.metadata['part']}")

    group = play(lambda ids, s: text("4"), 2, generate=fan_out, rm=rm)
    assert not group.trajectories and [failure.kind for failure in group.failures] == ["reward"] * 4
    for part in range(2):
        assert sum(f"no judge for part {part}" in failure.message for failure in group.failures) == 2


async def fails(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    if sample.index == 1:
        raise ValueError("no tool")
    sample.append(TOK.encode("4"), sampled=True)
    return sample


async def returns_text(args: Any, sample: Sample, sampling_params: Any) -> Any:
    return "4"


async def forgets_the_mask(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    return replace(sample, tokens=[*sample.tokens, 14, 15], response_length=2, loss_mask=[1])


async def aborts(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    return replace(sample, status=Sample.Status.ABORTED)


async def goes_on_for_ever(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    return replace(sample, tokens=[14] * 30, response_length=30)


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (fails, r"prompt 7 sample 1: .*test_hooks.py:\d+ fails\(\) raised ValueError: no tool at .*test_hooks.py:\d+$"),
        (returns_text, r"returned a str; return the sample, or a list"),
        (forgets_the_mask, r"forgets_the_mask\(\) returned 6 tokens, response_length 2 and a loss_mask of 1"),
        (aborts, "returned only aborted samples"),
        (goes_on_for_ever, "returned 30 tokens, --max_len is 24"),
    ],
)  # fmt: skip
def test_a_mistake_ends_one_episode_or_with_stop_the_run(generate: Any, message: str) -> None:
    group = play([], 2, generate=generate, sampling=SamplingParams())
    assert [f.kind for f in group.failures] == ["agent"] * (1 if generate is fails else 2)
    assert len(group.trajectories) == (1 if generate is fails else 0)
    with pytest.raises(AgentError, match=message):
        play([], 2, generate=generate, sampling=SamplingParams(), on_failure="stop")


# --- rewards


def test_a_reward_sees_the_sample_and_the_rows_facts() -> None:
    seen: list[Sample] = []

    async def rm(args: Any, sample: Sample) -> dict[str, Any]:
        seen.append(sample)
        numbers = {"share": np.float32(0.25), "length": np.int64(3), "kl": torch.tensor(0.5)}
        return {"points": 0.5, "score": True, "digits": 1, "why": "text", **numbers}

    args = replace(ARGS, reward_key="points")
    group = play([text("5")], rm=rm, args=args, metadata={"datasource": "sums", "level": 3})
    (sample,) = group.trajectories
    logged = {"digits": 1.0, "share": 0.25, "length": 3.0, "kl": 0.5}
    assert (sample.reward, sample.score, sample.extra_logs) == (0.5, 1.0, logged)
    (given,) = seen
    assert (given.prompt, given.label, given.response, given.metadata["level"]) == ("2+2=", "4", "5<eos>", 3)
    assert (given.tokens, given.response_length, given.loss_mask) == ([*TOK.encode("2+2="), *text("5")], 2, [1, 1])
    assert given.status == Sample.Status.COMPLETED and given.weight_versions == [3]
    assert "reward" in sample.timings


def test_a_group_is_scored_at_once_in_the_order_of_its_samples() -> None:
    replies = [text("44 4"), text("5"), text("4"), text("no 4")]
    group = play(replies, 4, rm=example("custom_rm_path", "group_reward"), group_rm=True)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.5, 1.0]


def test_a_group_is_shown_whole_and_given_rewards_stay() -> None:
    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        sample.append([14], sampled=True)
        sample.reward = 9.0 if sample.index == 1 else None
        return sample

    def rm(args: Any, samples: list[Sample]) -> list[float]:
        return [float(len(samples)) for _ in samples]

    group = play([], 3, generate=generate, rm=rm, group_rm=True, sampling=SamplingParams())
    assert [t.reward for t in group.trajectories] == [3.0, 9.0, 3.0]


def bad_rm(args: Any, sample: Sample) -> Any:
    if sample.index == 1:
        return {0: None, 1: float("nan"), 2: {"points": 1}, 3: [1.0, 2.0]}[sample.metadata["how"]]
    return 1.0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (0, 'returned None in "rewards" for prompt 7 sample 1'),
        (1, 'returned nan in "rewards" for prompt 7 sample 1; it must be a finite number'),
        (2, r"returned a dict without the key 'reward' \(--reward_key; keys: \['points'\]\) for prompt 7 sample 1"),
        (3, 'returned .* in "rewards" for prompt 7 sample 1'),
    ],
)
def test_a_wrong_reward_loses_its_sample_only(how: int, message: str) -> None:
    facts: dict[str, Any] = {"metadata": {"how": how}}
    group = play([text("4")] * 3, 3, rm=bad_rm, **facts)
    assert [t.sample_index for t in group.trajectories] == [0, 2]
    assert [f.kind for f in group.failures] == ["reward"]
    zeroed = play([text("4")] * 3, 3, rm=bad_rm, on_failure="zero", **facts)
    assert [(t.reward, t.extra_logs) for t in zeroed.trajectories] == [(1, {}), (0, {"reward_failed": 1.0}), (1, {})]
    with pytest.raises(RewardError, match=message):
        play([text("4")] * 3, 3, rm=bad_rm, on_failure="stop", **facts)


@pytest.mark.parametrize(
    ("rm", "message"),
    [
        (lambda args, samples: [1.0], r"returned 1 rewards for 3 samples; return a list, one for each"),
        (lambda args, samples: 1.0, r"returned float for 3 samples"),
        (lambda args, samples: [1.0, 2.0, None], r'returned None in "rewards" for prompt 7 sample 2'),
        (lambda args, samples: 1 / 0, r"raised ZeroDivisionError: division by zero at .*test_hooks.py:\d+ for prom"),
    ],
)  # fmt: skip
def test_a_wrong_reward_of_a_group_loses_the_group(rm: Any, message: str) -> None:
    group = play([text("4")] * 3, 3, rm=rm, group_rm=True)
    assert not group.trajectories and [f.kind for f in group.failures] == ["reward"] * 3
    with pytest.raises(RewardError, match=message):
        play([text("4")] * 3, 3, rm=rm, group_rm=True, on_failure="stop")


# --- filters


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ("45", DynamicFilterOutput(True)),
        ("44", DynamicFilterOutput(False, "all_right", True)),
        ("56", DynamicFilterOutput(False, "all_wrong", True)),
    ],
)
def test_the_examples_filter(answers: str, verdict: DynamicFilterOutput) -> None:
    keep, rm = example("dynamic_sampling_filter_path", "keep"), example("custom_rm_path", "reward")
    assert play([text(a) for a in answers], 2, keep=keep, rm=rm).verdict == verdict
    assert play([text(a) for a in answers], 2, keep=keep, rm=rm, epoch=EVAL_EPOCH).verdict is None


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (True, DynamicFilterOutput(True)),
        (np.std([1.0, 1.0]) > 0, DynamicFilterOutput(False, "not_kept")),
        (DynamicFilterOutput(False), DynamicFilterOutput(False, "not_kept")),
        (1.0, None),
        (None, None),
    ],
)
def test_what_a_filter_may_return(reply: Any, verdict: DynamicFilterOutput | None) -> None:
    group = play([text("4")] * 2, 2, keep=lambda args, samples: reply, rm=lambda args, sample: 1.0)
    assert group.verdict == verdict
    if verdict is None:
        assert not group.trajectories and [f.kind for f in group.failures] == ["filter"] * 2
        assert "return a bool or a DynamicFilterOutput" in group.failures[0].message


def test_a_filter_that_raises_loses_the_group_and_is_counted_and_quoted() -> None:
    def keep(args: Any, samples: list[Sample]) -> bool:
        return samples[0].metadata["missing"]

    group = play([text("4")] * 2, 2, keep=keep, rm=lambda args, sample: 1.0)
    collector = GroupCollector(1, lambda count: [group.item], CustomFilter("my.py:keep"), RolloutBuffer(), max_rounds=1)
    assert next(collector) == group.item
    assert collector.add(group) is False
    words = r"0 of 1 groups that my.py:keep keeps .* dropped: no_samples 1\)\. Of lost samples the last: prompt 7: "
    with pytest.raises(NoLearnableGroups, match=words + r".*keep\(\) raised KeyError: 'missing' at .*test_hooks.py"):
        collector.finish()


def judged(prompt_id: int, verdict: DynamicFilterOutput) -> Group:
    group = play([text("4")] * 2, 2, rm=lambda args, sample: 1.0)
    return replace(group, item=replace(group.item, prompt_id=prompt_id, group_id=prompt_id), verdict=verdict)


def test_dropped_groups_fill_a_step_only_if_they_may_and_are_needed() -> None:
    spare, bad, good = (
        DynamicFilterOutput(False, "dull", True),
        DynamicFilterOutput(False, "bad"),
        DynamicFilterOutput(True),
    )
    groups = [judged(i, v) for i, v in enumerate([spare, bad, good, spare])]
    for target, wanted, insufficient in ((1, [2], 0), (2, [2, 0], 1), (3, [2, 0, 3], 2)):
        items = [group.item for group in groups]
        collector = GroupCollector(
            target, lambda count, items=items: items, CustomFilter("f"), RolloutBuffer(), first_draw=4, max_rounds=1
        )
        assert list(collector) == items
        for group in reversed(groups):
            collector.add(group)
        collected = collector.finish()
        assert [g.item.prompt_id for g in collected.groups] == wanted
        metrics = collected.metrics()
        assert (metrics["rollout/filtered_dull"], metrics["rollout/filtered_bad"]) == (2, 1)
        assert metrics.get("rollout/groups_insufficient", 0) == insufficient
        assert metrics["dynamic_filtering_pass_rate"] == 25


# --- buffer


def waiting(*rewards: float, priorities: tuple[Any, ...] = (None, None, None)) -> RolloutBuffer:
    buffer = RolloutBuffer()
    for index, (reward, priority) in enumerate(zip(rewards, priorities, strict=True)):
        group = judged(index, DynamicFilterOutput(True))
        facts = {} if priority is None else {"priority": priority}
        samples = tuple(replace(t, reward=reward) for t in group.trajectories)
        buffer.put(replace(group, item=replace(group.item, metadata=facts), trajectories=samples))
    return buffer


def taken(path: str, buffer: RolloutBuffer, count: int = 2) -> tuple[list[int], BufferFilter]:
    select = BufferFilter(path, ARGS)
    return [group.item.prompt_id for group in buffer.take(count, select)], select


def test_buffer_filters() -> None:
    assert taken(f"{EXAMPLES}:hardest_first", waiting(0.9, 0.1, 0.5))[0] == [1, 2]
    assert taken("fifo", waiting(0.9, 0.1, 0.5))[0] == [0, 1]
    assert taken("priority", waiting(0, 0, 0, priorities=(None, 2, "1.5")))[0] == [1, 2]
    assert taken("priority", waiting(0, 0, 0, priorities=(-1, None, 0.5)))[0] == [2, 1]
    hardest = BufferFilter(f"{EXAMPLES}:hardest_first", ARGS)
    collector = GroupCollector(2, list, None, waiting(0.9, 0.1, 0.5), select=hardest)
    assert [g.item.prompt_id for g in collector.finish().groups] == [1, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0]", r"f\(\) gave \[0\]; needed are 2 different indices below 3"),
        ("return groups[:2]", "needed are 2 different indices|unhashable"),
        ("return None", "not iterable"),
        ("return 1 / 0", r"ZeroDivisionError: division by zero at .*f.py:2"),
    ],
)
def test_a_wrong_buffer_filter_costs_no_group(tmp_path: Path, body: str, message: str) -> None:
    (tmp_path / "f.py").write_text(f"def f(args, groups, count):\n    {body}\n")
    buffer = waiting(0.9, 0.1, 0.5)
    chosen, select = taken(f"{tmp_path}/f.py:f", buffer)
    assert chosen == [0, 1] and len(buffer) == 1 and (select.pop_failures(), select.pop_failures()) == (1, 0)
    assert re.search(message, select.last_error)


# --- dump and metrics


def test_facts_reach_the_dump_and_rewards_are_split_by_source(tmp_path: Path) -> None:
    samples = []
    for source, answer in (("sums", "4"), ("words", "5")):
        facts = {"datasource": source, "tools": [{"name": "calc"}], "level": {"deep": [1, 2]}}
        samples += play([text(answer)], rm=example("custom_rm_path", "reward"), metadata=facts).trajectories
    metrics = rollout_metrics(samples, max_new_tokens=None, max_len=64)
    assert (metrics["reward/sums"], metrics["reward/words"]) == (1.0, pytest.approx(0.1))
    path = RolloutDumpWriter(tmp_path).write(1, samples)
    line = json.loads(path.read_text().splitlines()[0])
    assert line["metadata"]["tools"] == [{"name": "calc"}] and line["metadata"]["level"] == {"deep": [1, 2]}
    assert Sample.of(read_rollout_dump(path)[0][0]).metadata["datasource"] == "sums"
