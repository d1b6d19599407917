"""Telling sources that score whole batches from those written for one sample per call."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from openrlhf.rollout.errors import RewardError
from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, SingleValueReply, UnusableValue
from openrlhf.rollout.usercode import DeadlinePassed, gather_all

logger = logging.getLogger(__name__)

Call = Callable[[Sequence[RewardRequest]], Awaitable[list[RewardResult]]]


class BatchCaller:
    """Gives a source whole batches, until it shows that it was written for single samples.

    It shows it by one value for several samples; or by a failure, before it has answered any batch of several, where
    each sample of that batch passes by itself. From then on it gets one sample per call.

    Args:
        where: the source, for messages.
        one_by_one: known from the start.
    """

    def __init__(self, where: str, *, one_by_one: bool = False) -> None:
        self.one_by_one = one_by_one
        self._where = where
        self._batches_pass = False

    async def score(self, batch: Sequence[RewardRequest], call: Call, probe: Call) -> list[RewardResult]:
        """Returns one result for each request, in order.

        Args:
            batch: not empty.
            call: scores requests.
            probe: scores one request, without many retries: the source may just be down.

        Raises:
            RewardError: of the batch where one of its samples fails too, else of a single sample.
        """
        if len(batch) == 1:
            return await call(batch)
        if not self.one_by_one:
            try:
                results = await call(batch)
                self._batches_pass = True
                return results
            except SingleValueReply:
                self._switch(f"returned one value for {len(batch)} samples")
            except UnusableValue:
                self._batches_pass = True  # it has answered each sample
                raise
            except RewardError as error:
                if self._batches_pass or isinstance(error.__cause__, DeadlinePassed):
                    raise
                try:
                    results = await probe(batch[:1]) + await self._each(batch[1:], call)
                except RewardError:
                    raise error from error.__cause__  # the samples are to blame
                self._switch(f"failed on {len(batch)} samples, and on none of them alone ({error})")
                return results
        return await self._each(batch, call)

    @staticmethod
    async def _each(batch: Sequence[RewardRequest], call: Call) -> list[RewardResult]:
        singles = await gather_all([call([request]) for request in batch])
        return [result for single in singles for result in single]

    def _switch(self, what: str) -> None:
        if not self.one_by_one:
            self.one_by_one = True
            logger.warning(
                "%s %s: it gets one sample per call from now on. Return one number per query to score whole "
                "batches at once.",
                self._where,
                what,
            )
