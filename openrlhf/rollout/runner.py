"""Rolling out many prompts at once, within limits and a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Protocol

from openrlhf.rollout.episodes import EpisodeFailure, EpisodeSpec, Group, PromptItem, run_group
from openrlhf.rollout.errors import RolloutTimeout
from openrlhf.rollout.protocol import GenerationEngine

logger = logging.getLogger(__name__)

_CANCEL_GRACE_SECONDS = 5.0


class EngineChooser(Protocol):
    """Says which engine serves a group."""

    def acquire(self, item: PromptItem, samples: int) -> GenerationEngine:
        """Returns an engine for `samples` samples of one prompt."""
        ...

    def release(self, engine: GenerationEngine, samples: int) -> None:
        """Gives back what `acquire` took."""
        ...


class LeastLoaded:
    """Sends each group to the engine with the fewest samples in flight (the first of them on a tie)."""

    def __init__(self, engines: Sequence[GenerationEngine]) -> None:
        if not engines:
            raise ValueError("at least one generation engine is needed")
        self._engines = list(engines)
        self._load = [0] * len(self._engines)

    def acquire(self, item: PromptItem, samples: int) -> GenerationEngine:
        """Returns the least-loaded engine and counts the samples on it."""
        index = min(range(len(self._engines)), key=lambda i: self._load[i])
        self._load[index] += samples
        return self._engines[index]

    def release(self, engine: GenerationEngine, samples: int) -> None:
        """Takes the samples off the engine's count."""
        index = next(i for i, own in enumerate(self._engines) if own is engine)
        self._load[index] -= samples


class RolloutRunner:
    """Runs groups with bounded concurrency and yields each as it finishes.

    Args:
        chooser: which engine serves a group.
        spec: what all episodes have in common.
        max_concurrent_groups: groups in flight at the same time.
        timeout: seconds for a whole `run`; None = no limit.
        on_timeout: "raise" ends the rollout with RolloutTimeout, "drop" yields what is unfinished as groups
            without samples. Counted.
    """

    def __init__(
        self,
        chooser: EngineChooser,
        spec: EpisodeSpec,
        *,
        max_concurrent_groups: int = 256,
        timeout: float | None = 3600.0,
        on_timeout: str = "raise",
    ) -> None:
        if on_timeout not in ("raise", "drop"):
            raise ValueError(f"on_timeout must be raise or drop, got {on_timeout!r}")
        if max_concurrent_groups < 1:
            raise ValueError(f"max_concurrent_groups must be at least 1, got {max_concurrent_groups}")
        self.spec = spec
        self._chooser = chooser
        self._max_concurrent = max_concurrent_groups
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._counts: Counter[str] = Counter()

    async def run(self, items: Iterable[PromptItem], n: int) -> AsyncIterator[Group]:
        """Yields one group for each prompt, in order of completion.

        Breaking out of the iteration needs `aclose()` on the iterator to cancel what is in flight.

        Raises:
            RolloutTimeout: the deadline passed and `on_timeout` is "raise".
            RolloutError: an episode failed in a way that no policy covers.
        """
        if n < 1:
            raise ValueError(f"a group needs at least one sample, got n={n}")
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        source = iter(items)
        running: dict[asyncio.Task[Group], PromptItem] = {}
        finished = 0
        try:
            self._fill(running, source, n)
            while running:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    for group in self._unfinished(list(running.values()), list(source), n, finished):
                        yield group
                    return
                for task in [task for task in running if task in done]:
                    item = running.pop(task)
                    group = self._counted(task.result(), item, n)
                    finished += 1
                    yield group
                self._fill(running, source, n)
        finally:
            await _cancel(running)

    async def collect(self, items: Sequence[PromptItem], n: int) -> list[Group]:
        """Runs all prompts and returns their groups in the order of `items`."""
        order = {item.group_id: position for position, item in enumerate(items)}
        if len(order) != len(items):
            raise ValueError("two prompts of one rollout share a group_id")
        groups = [group async for group in self.run(items, n)]
        return sorted(groups, key=lambda group: order[group.item.group_id])

    def pop_metrics(self) -> dict[str, float]:
        """Returns the counts since the last call, and starts anew."""
        names = ("groups", "prompts_truncated", "failures")
        kinds = ("agent", "timeout", "reward", "long_prompt", "deadline")
        metrics = {f"rollout/{name}": float(self._counts[name]) for name in names}
        metrics.update({f"rollout/failures_{kind}": float(self._counts[f"failures_{kind}"]) for kind in kinds})
        self._counts.clear()
        return metrics

    def _fill(self, running: dict[asyncio.Task[Group], PromptItem], source: Iterator[PromptItem], n: int) -> None:
        while len(running) < self._max_concurrent:
            item = next(source, None)
            if item is None:
                return
            running[asyncio.ensure_future(self._run_group(item, n))] = item

    async def _run_group(self, item: PromptItem, n: int) -> Group:
        engine = self._chooser.acquire(item, n)
        try:
            return await run_group(item, n, engine, self.spec)
        finally:
            self._chooser.release(engine, n)

    def _counted(self, group: Group, item: PromptItem, n: int) -> Group:
        self._counts["groups"] += 1
        self._counts["prompts_truncated"] += group.prompt_truncated
        for failure in group.failures:
            self._counts["failures"] += 1
            self._counts[f"failures_{failure.kind}"] += 1
        if group.failures:
            logger.warning(
                "prompt %d: %d of %d samples lost, the first because: %s",
                item.prompt_id,
                len(group.failures),
                n,
                group.failures[0].message,
            )
        return group

    def _unfinished(
        self, running: Sequence[PromptItem], waiting: Sequence[PromptItem], n: int, finished: int
    ) -> list[Group]:
        """Applies the policy for what the deadline cut off."""
        ids = [item.prompt_id for item in (*running, *waiting)]
        shown = ", ".join(map(str, ids[:10])) + (" ..." if len(ids) > 10 else "")
        message = (
            f"the rollout did not end within {self._timeout:g} s: {finished} groups done, {len(ids)} "
            f"unfinished (prompt ids {shown}; {len(running)} of them running)"
        )
        if self._on_timeout == "raise":
            raise RolloutTimeout(message)
        groups = []
        for item in (*running, *waiting):
            failures = tuple(EpisodeFailure(item.prompt_id, index, "deadline", message) for index in range(n))
            groups.append(self._counted(Group(item, (), failures), item, n))
        return groups


async def _cancel(tasks: Iterable[asyncio.Task[Group]]) -> None:
    """Cancels tasks, and waits a moment for them: agent code may ignore its cancellation."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending, timeout=_CANCEL_GRACE_SECONDS)
