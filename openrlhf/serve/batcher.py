"""Batches across requests: while the model works on one batch, the next one collects."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from openrlhf.utils.logging import get_logger

logger = get_logger(__name__)


class QueueFull(Exception):
    """There is no room for the request now."""


class _Request:
    def __init__(self, count: int) -> None:
        self.scores = [0.0] * count
        self.left = count
        self.future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def put(self, index: int, score: float) -> None:
        self.scores[index] = score
        self.left -= 1
        if self.left == 0 and not self.future.done():
            self.future.set_result(self.scores)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Batcher:
    """Scores the sequences of many requests together, first come, first served.

    No request waits for a batch to fill: an idle model starts at once, and what arrives meanwhile is the next batch.

    Args:
        score: one number for each of some token sequences; runs in a thread of its own, never twice at a time.
        max_batch: most sequences in a call of ``score``.
        max_waiting: most sequences that wait.
        on_batch: told the size of each batch, when it starts.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Sequence[int]]], list[float]],
        max_batch: int,
        max_waiting: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._score = score
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._on_batch = on_batch
        self._items: deque[tuple[_Request, int, Sequence[int]]] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Sequences that no batch has taken yet."""
        return len(self._items)

    @property
    def alive(self) -> bool:
        """Whether requests are being worked on."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Begin to work, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End after the current batch; requests that still wait are never answered, so call it when none does."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=True)

    async def submit(self, sequences: Sequence[Sequence[int]], timeout_s: float) -> list[float]:
        """The scores of a request, in order.

        Raises:
            QueueFull: too many sequences wait already.
            TimeoutError: not done in time; what is left of the request is dropped.
            Exception: what ``score`` raised for a batch with one of the sequences.
        """
        if not sequences:
            return []
        if len(self._items) + len(sequences) > self._max_waiting:
            raise QueueFull
        request = _Request(len(sequences))
        self._items.extend((request, index, ids) for index, ids in enumerate(sequences))
        self._arrived.set()
        return await asyncio.wait_for(request.future, timeout_s)

    def _take(self) -> list[tuple[_Request, int, Sequence[int]]]:
        batch: list[tuple[_Request, int, Sequence[int]]] = []
        while self._items and len(batch) < self._max_batch:
            item = self._items.popleft()
            if not item[0].future.done():  # else its request failed, or its client gave up
                batch.append(item)
        return batch

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._items:
                self._arrived.clear()
                await self._arrived.wait()
            batch = self._take()
            if not batch:
                continue
            self._on_batch(len(batch))
            try:
                scores = await loop.run_in_executor(self._thread, self._score, [ids for _, _, ids in batch])
            except Exception as error:  # the model's failure belongs to the requests of this batch
                logger.exception("scoring %d texts failed", len(batch))
                for request, _, _ in batch:
                    request.fail(error)
                continue
            for (request, index, _), score in zip(batch, scores, strict=True):
                request.put(index, score)
