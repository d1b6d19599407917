"""Collects single requests into batches, applies the failure policy, and keeps the counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, RewardSource, sample_names
from openrlhf.rollout.usercode import gather_all

logger = logging.getLogger(__name__)

BATCH_SIZE = 16


@dataclass(frozen=True)
class NoReward:
    """Why a sample is to be left out."""

    reason: str


_Verdict = asyncio.Future[RewardResult | NoReward]
_Entry = tuple[RewardRequest, _Verdict]


class RewardClient:
    """One reward source for many concurrent episodes.

    All samples that are ready at the same moment go out together, up to `batch_size` a call; while
    `max_concurrency` calls are running, further samples gather for the next one.

    Args:
        source: where rewards come from.
        on_failure: what a final failure does: "stop" raises, "drop" leaves the sample out (`score` returns
            a `NoReward`), "zero" gives reward and score 0.0 and the extra log ``reward_failed`` = 1. All are counted.
        batch_size: samples in one call of the source.
        max_concurrency: calls of the source at the same time.

    Attributes:
        latencies: seconds of every call since the metrics were taken, failed ones included.
    """

    def __init__(
        self,
        source: RewardSource,
        *,
        on_failure: str = "stop",
        batch_size: int = BATCH_SIZE,
        max_concurrency: int = 16,
    ) -> None:
        self._source = source
        self._on_failure = on_failure
        self._batch_size = batch_size
        self._max_concurrency = max_concurrency
        self._waiting: deque[_Entry] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self.latencies: list[float] = []
        self._retries_reported = 0

    async def score(self, request: RewardRequest, seconds: float | None = None) -> RewardResult | NoReward:
        """Returns the result for one sample, or why there is none where it failed and the policy is "drop".

        Args:
            seconds: what takes longer has failed, whatever the limits of the source; None = only these count.

        Raises:
            RewardError: it failed and the policy is "stop".
        """
        loop = asyncio.get_running_loop()
        future: _Verdict = loop.create_future()
        self._waiting.append((request, future))
        # Not at once: what else becomes ready in this turn of the loop joins the same call.
        loop.call_soon(self._start_calls)
        if seconds is None:
            return await future
        end = loop.call_later(seconds, self._give_up, request, future, seconds)
        try:
            return await future
        finally:
            end.cancel()

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | NoReward]:
        """As `score` for all samples of a prompt, in one call of the source."""
        loop = asyncio.get_running_loop()
        entries: list[_Entry] = [(request, loop.create_future()) for request in requests]
        self._start(entries)
        return await gather_all([future for _, future in entries])

    async def close(self) -> None:
        """Cancels what is running and closes the source."""
        for task in list(self._running):
            task.cancel()
        await self._source.close()

    def pop_metrics(self) -> dict[str, float]:
        """Returns counts and latencies since the last call, and starts anew."""
        retries = int(getattr(self._source, "retries", 0))
        metrics = {
            "reward/samples": float(self._counts["samples"]),
            "reward/calls": float(self._counts["calls"]),
            "reward/failures": float(self._counts["failures"]),
            "reward/dropped": float(self._counts["dropped"]),
            "reward/zeroed": float(self._counts["zeroed"]),
            "reward/retries": float(retries - self._retries_reported),
        }
        if self.latencies:
            metrics["reward/latency_mean"] = sum(self.latencies) / len(self.latencies)
            metrics["reward/latency_max"] = max(self.latencies)
        self._retries_reported = retries
        self._counts.clear()
        self.latencies.clear()
        return metrics

    def _start_calls(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrency:
            batch: list[_Entry] = []
            while self._waiting and len(batch) < self._batch_size:
                entry = self._waiting.popleft()
                if not entry[1].done():  # its episode may have been cancelled
                    batch.append(entry)
            if batch:
                self._start(batch)

    def _start(self, batch: Sequence[_Entry]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start_calls()

    async def _run(self, batch: Sequence[_Entry]) -> None:
        try:
            outcomes = await self._outcomes([request for request, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    # Cancelled callers have gone; anybody else must not wait for ever.
                    future.set_exception(error if isinstance(error, Exception) else RewardError("reward client closed"))
            if not isinstance(error, Exception):
                raise
            return
        errors = {id(outcome): outcome for outcome in outcomes if isinstance(outcome, RewardError)}
        for failure in errors.values():
            self._tell(failure)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, RewardError):
                self._fail(future, outcome)
            else:
                future.set_result(outcome)

    def _give_up(self, request: RewardRequest, future: _Verdict, seconds: float) -> None:
        if not future.done():
            error = RewardError(
                f"{sample_names([request])}: no reward in the {seconds:.1f} s that were left of its episode's time "
                "(--rollout_timeout)"
            )
            self._tell(error)
            self._fail(future, error)

    def _tell(self, error: RewardError) -> None:
        if self._on_failure != "stop":
            logger.warning("no reward (%s): %s", self._on_failure, error)

    async def _outcomes(self, requests: Sequence[RewardRequest]) -> Sequence[RewardResult | RewardError]:
        outcomes = await self._call(requests)
        error = outcomes[0] if len(requests) > 1 else None
        if isinstance(error, RewardError) and error.isolatable and self._on_failure != "stop":
            # One bad sample must not cost the others of its batch their rewards.
            outcomes = [(await self._call([request]))[0] for request in requests]
        self._counts["samples"] += len(requests)
        return outcomes

    async def _call(self, requests: Sequence[RewardRequest]) -> Sequence[RewardResult | RewardError]:
        started = time.monotonic()
        try:
            results = await self._source.score(requests)
        except RewardError as error:
            return [error] * len(requests)
        finally:
            # Together: metrics are also taken while calls run, and a latency of no call would have no weight.
            self._counts["calls"] += 1
            self.latencies.append(time.monotonic() - started)
        if len(results) != len(requests):
            name = type(self._source).__name__
            return [RewardError(f"{name} returned {len(results)} results for {len(requests)} requests")] * len(requests)
        return results

    def _fail(self, future: _Verdict, error: RewardError) -> None:
        self._counts["failures"] += 1
        if self._on_failure == "stop":
            future.set_exception(error)
        elif self._on_failure == "drop":
            self._counts["dropped"] += 1
            future.set_result(NoReward(str(error)))
        else:
            self._counts["zeroed"] += 1
            future.set_result(RewardResult(0.0, 0.0, {"reward_failed": 1.0}))
