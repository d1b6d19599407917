"""Batching, failure policies and counts of the reward client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards import FunctionReward, RewardClient, RewardRequest, RewardResult
from openrlhf.rollout.rewards.client import NoReward


def request(index: int) -> RewardRequest:
    return RewardRequest(f"q{index}", "p", index, {}, f"prompt {index} sample 0")


def score_all(client: RewardClient, count: int) -> list[RewardResult | None]:
    async def run() -> list[RewardResult | None]:
        return await asyncio.gather(*(client.score(request(i)) for i in range(count)))

    return asyncio.run(run())


def test_what_is_ready_goes_out_together() -> None:
    sizes = []

    async def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[int]:
        sizes.append(len(queries))
        await asyncio.sleep(0.01)
        return labels

    client = RewardClient(FunctionReward(reward_func), batch_size=4, max_concurrency=2)
    started = time.monotonic()
    assert [r.reward for r in score_all(client, 11) if r] == [float(i) for i in range(11)]
    seconds = time.monotonic() - started
    assert sizes == [4, 4, 3]
    metrics = client.pop_metrics()
    assert metrics["reward/samples"] == 11 and metrics["reward/calls"] == 3 and metrics["reward/failures"] == 0
    assert 0.0 < metrics["reward/latency_mean"] <= metrics["reward/latency_max"] <= seconds
    assert client.pop_metrics()["reward/samples"] == 0


def test_a_call_counts_when_it_has_ended() -> None:
    """In asynchronous training metrics are taken while rewards are on their way."""

    async def run() -> list[dict[str, float]]:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[int]:
            begun.set()
            await go_on.wait()
            return labels

        client = RewardClient(FunctionReward(reward_func))
        sample = asyncio.create_task(client.score(request(1)))
        await begun.wait()
        taken = [client.pop_metrics()]
        go_on.set()
        await sample
        return [*taken, client.pop_metrics()]

    during, afterwards = asyncio.run(run())
    assert during["reward/calls"] == 0 and "reward/latency_mean" not in during
    assert afterwards["reward/calls"] == 1 and afterwards["reward/latency_mean"] > 0


def bad_for(*bad: int) -> FunctionReward:
    def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[float]:
        return [float("nan") if label in bad else 1.0 + label for label in labels]

    return FunctionReward(reward_func)


def test_stop_raises_and_names_the_sample() -> None:
    client = RewardClient(bad_for(2))
    with pytest.raises(RewardError, match='nan in "rewards" for prompt 2 sample 0'):
        score_all(client, 4)


def test_drop_and_zero_touch_only_the_bad_sample() -> None:
    client = RewardClient(bad_for(2), on_failure="drop")
    results = score_all(client, 4)
    assert [r.reward for r in (*results[:2], results[3])] == [1.0, 2.0, 4.0]
    assert isinstance(results[2], NoReward) and "prompt 2 sample 0" in results[2].reason
    metrics = client.pop_metrics()
    assert (metrics["reward/samples"], metrics["reward/failures"], metrics["reward/dropped"]) == (4, 1, 1)
    client = RewardClient(bad_for(2), on_failure="zero")
    assert score_all(client, 4)[2] == RewardResult(0.0, 0.0, {"reward_failed": 1.0})
    assert client.pop_metrics()["reward/zeroed"] == 1


def test_a_source_that_is_down_is_not_asked_again_for_each_sample() -> None:
    class Down:
        calls = 0

        async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
            self.calls += 1
            raise RewardError("down")

        async def close(self) -> None: ...

    source = Down()
    client = RewardClient(source, on_failure="drop")
    assert score_all(client, 3) == [NoReward("down")] * 3
    assert source.calls == 1


def test_a_source_that_returns_too_few_is_an_error() -> None:
    class Short:
        async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
            return [RewardResult(1.0, 1.0)]

        async def close(self) -> None: ...

    with pytest.raises(RewardError, match="Short returned 1 results for 2 requests"):
        score_all(RewardClient(Short()), 2)


def test_a_bug_in_a_source_reaches_every_waiting_sample() -> None:
    class Broken:
        async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
            raise ZeroDivisionError

        async def close(self) -> None: ...

    async def run() -> list[Any]:
        client = RewardClient(Broken())
        return await asyncio.gather(*(client.score(request(i)) for i in range(3)), return_exceptions=True)

    assert [type(outcome) for outcome in asyncio.run(run())] == [ZeroDivisionError] * 3


def test_closing_frees_those_who_wait() -> None:
    async def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[int]:
        await asyncio.sleep(60)
        return labels

    async def run() -> None:
        client = RewardClient(FunctionReward(reward_func))
        waiting = asyncio.ensure_future(client.score(request(0)))
        await asyncio.sleep(0.01)
        await client.close()
        with pytest.raises(RewardError, match="reward client closed"):
            await waiting

    asyncio.run(run())


def test_cancelled_samples_are_not_scored() -> None:
    seen = []

    async def reward_func(queries: list[str], prompts: list[str], labels: list[int]) -> list[int]:
        seen.extend(labels)
        return labels

    async def run() -> None:
        client = RewardClient(FunctionReward(reward_func))
        tasks = [asyncio.ensure_future(client.score(request(i))) for i in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        assert await tasks[1] == RewardResult(1.0, 1.0)

    asyncio.run(run())
    assert seen == [1]
