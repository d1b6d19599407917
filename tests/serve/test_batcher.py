"""Batches across requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from openrlhf.serve.batcher import Batcher, QueueFull


class SlowScorer:
    """Scores a sequence with its sum; each call waits until the test lets it go on."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Semaphore(0)
        self.active = 0

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.active += 1
        assert self.active == 1, "two batches at a time"
        self.sizes.append(len(sequences))
        assert self.gate.acquire(timeout=60)
        self.active -= 1
        if any(-1 in ids for ids in sequences):
            raise RuntimeError("no memory")
        return [float(sum(ids)) for ids in sequences]


def run(scenario, scorer: SlowScorer, max_batch: int = 4, max_waiting: int = 8) -> None:
    async def main() -> None:
        batcher = Batcher(scorer, max_batch, max_waiting)
        batcher.start()
        assert batcher.alive
        try:
            await asyncio.wait_for(scenario(batcher), 60)
        finally:
            scorer.gate.release(100)
            await batcher.stop()
        assert not batcher.alive

    asyncio.run(main())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_requests_share_batches_and_keep_their_order() -> None:
    scorer = SlowScorer()

    async def scenario(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.submit([[1]], 60))
        await until(lambda: scorer.sizes == [1])
        # While the first is scored, three requests with six sequences collect.
        others = [asyncio.create_task(batcher.submit([[n, k] for k in range(n)], 60)) for n in (1, 2, 3)]
        await until(lambda: batcher.waiting == 6)
        scorer.gate.release(3)
        assert await first == [1.0]
        assert await asyncio.gather(*others) == [[1.0], [2.0, 3.0], [3.0, 4.0, 5.0]]

    run(scenario, scorer)
    assert scorer.sizes == [1, 4, 2]


def test_a_full_queue_refuses_and_recovers() -> None:
    scorer = SlowScorer()

    async def scenario(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.submit([[1]], 60))
        await until(lambda: scorer.sizes == [1])
        second = asyncio.create_task(batcher.submit([[2]] * 7, 60))
        await until(lambda: batcher.waiting == 7)
        with pytest.raises(QueueFull):
            await batcher.submit([[3]] * 2, 60)
        third = asyncio.create_task(batcher.submit([[3]], 60))
        await until(lambda: batcher.waiting == 8)
        scorer.gate.release(3)
        assert await first + await second + await third == [1.0] + [2.0] * 7 + [3.0]

    run(scenario, scorer)


def test_a_failure_concerns_its_batch_only() -> None:
    scorer = SlowScorer()

    async def scenario(batcher: Batcher) -> None:
        scorer.gate.release(3)
        with pytest.raises(RuntimeError, match="no memory"):
            await batcher.submit([[-1]] * 6, 60)  # the second batch of this request is not computed any more
        assert await batcher.submit([[5]], 60) == [5.0]

    run(scenario, scorer)
    assert scorer.sizes == [4, 1]


def test_a_request_that_takes_too_long_is_dropped() -> None:
    scorer = SlowScorer()

    async def scenario(batcher: Batcher) -> None:
        first = asyncio.create_task(batcher.submit([[1]], 60))
        await until(lambda: scorer.sizes == [1])
        with pytest.raises(TimeoutError):
            await batcher.submit([[2]], 0.05)
        scorer.gate.release(2)
        assert await first == [1.0]
        assert await batcher.submit([[3]], 60) == [3.0]

    run(scenario, scorer)
    assert scorer.sizes == [1, 1]


def test_nothing_to_score() -> None:
    async def scenario(batcher: Batcher) -> None:
        assert await batcher.submit([], 1) == []

    run(scenario, SlowScorer())
