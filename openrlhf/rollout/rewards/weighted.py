"""Several rewards that add up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from openrlhf.rollout.rewards.base import RewardRequest, RewardResult, RewardSource
from openrlhf.rollout.usercode import gather_all


class WeightedReward:
    """The weighted sum of several sources, each of which scores every sample.

    The score is the weighted sum of the scores. Each part is in the extra logs as ``reward_part/<name>``, before its
    weight; extra logs of a source are there as ``<name>/<log>``.

    Args:
        sources: by name.
        weights: for each name.
    """

    def __init__(self, sources: Mapping[str, RewardSource], weights: Mapping[str, float]) -> None:
        self._sources = dict(sources)
        self._weights = [weights[name] for name in self._sources]

    @property
    def retries(self) -> int:
        """Requests that were sent again, over all sources."""
        return sum(int(getattr(source, "retries", 0)) for source in self._sources.values())

    async def score(self, batch: Sequence[RewardRequest]) -> list[RewardResult]:
        """Returns one result for each request, in order.

        Raises:
            RewardError: one of the sources has no valid result.
        """
        parts = await gather_all([source.score(batch) for source in self._sources.values()])
        return [self._sum(results) for results in zip(*parts, strict=True)]

    async def close(self) -> None:
        """Closes all sources."""
        await gather_all([source.close() for source in self._sources.values()])

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        logs: dict[str, float] = {}
        for name, result in zip(self._sources, results, strict=True):
            logs[f"reward_part/{name}"] = result.reward
            logs.update({f"{name}/{log}": value for log, value in result.extra_logs.items()})
        pairs = list(zip(self._weights, results, strict=True))
        reward = math.fsum(weight * result.reward for weight, result in pairs)
        score = math.fsum(weight * result.score for weight, result in pairs)
        return RewardResult(reward, score, logs)
