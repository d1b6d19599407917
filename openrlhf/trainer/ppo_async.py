"""Asynchronous PPO: a thread keeps the engines generating while the loop trains; the loop itself is PPOTrainer's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from openrlhf.engines import pool as engine_pool
from openrlhf.rollout.errors import RolloutTimeout
from openrlhf.rollout.trajectory import Trajectory
from openrlhf.trainer.ppo import PPOTrainer
from openrlhf.trainer.ppo_async_queue import AsyncGroups, QueueLimits, RolloutQueue
from openrlhf.utils import interrupts

POLL_SECONDS = 0.05
"""How often the thread looks for prompts that it may start while others run."""

JOIN_SECONDS = 30.0
"""How long the thread may take to notice that it is over."""


class AsyncRollouts:
    """A thread that generates what its queue allows.

    An error in the thread ends the run: it comes out of every wait here and of those of the training
    (:func:`openrlhf.utils.interrupts.fail`).

    Args:
        queue: what may be started, and what is ready; used by one thread at a time.
        calls: the engines.
        timeout: seconds without any progress after which a wait gives up.
    """

    def __init__(self, queue: RolloutQueue, calls: engine_pool.GroupCalls, timeout: float) -> None:
        self._queue = queue
        self._calls = calls
        self._timeout = timeout
        self._changed = threading.Condition()
        self._progress = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._start_prompts()
                groups = self._calls.wait(POLL_SECONDS) if len(self._calls) else []
                with self._changed:
                    for group in groups:
                        self._queue.finished(group)
                    if groups:
                        self._progress += 1
                        self._changed.notify_all()
                    elif not len(self._calls):
                        self._changed.wait(POLL_SECONDS)
        except BaseException as error:  # handed to the main thread, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
            interrupts.fail(error)

    def _start_prompts(self) -> None:
        while self._calls.has_room:
            with self._changed:
                prompt = self._queue.next_prompt()
            if prompt is None:
                return
            self._calls.submit(prompt)

    def close(self) -> None:
        """Stop generating; what is in flight is given up.

        Raises:
            RolloutTimeout: the thread did not end.
        """
        self._stopping = True
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                raise RolloutTimeout(f"the rollout thread did not end within {JOIN_SECONDS:g} s")

    # --- the trainer's side ----------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[RolloutQueue]:
        """The queue, standing still."""
        with self._changed:
            yield self._queue

    def take(self) -> AsyncGroups:
        """Wait for the groups of the next step; none when all data is used up.

        Raises:
            RolloutTimeout: nothing has moved for too long.
            Exception: whatever ended the thread.
        """
        with self._changed:
            self._wait_until(lambda: self._queue.ready, "the groups of the next step")
            groups = self._queue.take()
            self._changed.notify_all()
            return groups

    @contextmanager
    def holding(self, version: int, drain: bool) -> Iterator[None]:
        """Around a weight update: no prompts are started.

        Args:
            version: number of the weights that the engines have afterwards.
            drain: first wait for the groups of the next step, and for what else is in flight. With a queue of one
                step, which weights generate a group does then not depend on the time that anything takes.
        """
        with self._changed:
            if drain:
                what = "the running groups, before a weight update"
                self._wait_until(lambda: self._queue.ready or self._queue.idle, what)
                self._queue.hold()
                self._wait_until(lambda: not self._queue.in_flight, what)
            self._queue.hold()
        yield
        with self._changed:
            self._queue.weights_changed(version)
            self._changed.notify_all()
        if self._thread.ident is None:
            self._thread.start()

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait with the lock held."""
        # Episodes that are late end in their engine, which comes first.
        limit = self._timeout + engine_pool.ANSWER_SECONDS
        seen, deadline = self._progress, time.monotonic() + limit
        while True:
            if self._error is not None:
                raise self._error
            interrupts.check()
            if condition():
                return
            if self._progress != seen:
                seen, deadline = self._progress, time.monotonic() + limit
            if time.monotonic() > deadline:
                running = sorted(item.prompt_id for item in self._queue.in_flight)
                raise RolloutTimeout(
                    f"waited for {what}, and no group was done for {limit:g} s (--rollout_timeout, and "
                    f"{engine_pool.ANSWER_SECONDS:g} s for the engines' answers); "
                    f"{len(running)} prompts are running, ids {running[:10]}"
                )
            self._changed.wait(min(interrupts.POLL_SECONDS, max(0.01, deadline - time.monotonic())))


class AsyncPPOTrainer(PPOTrainer):
    """:class:`PPOTrainer` with rollouts that are generated while it trains (``--async_train``).

    A checkpoint holds the finished groups that wait, and names the prompts that were being generated: a run that goes
    on generates these again, with the weights of the checkpoint.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rollouts: AsyncRollouts | None = None
        self._counted: Mapping[str, Any] | None = None  # in the queue of the run that this one goes on from

    @property
    def rollouts(self) -> AsyncRollouts:
        """Made when it is first used: after a resume has filled the buffer."""
        if self._rollouts is None:
            cfg = self.cfg
            assert cfg.vllm_generate_batch_size is not None  # the configuration fills it in
            limits = QueueLimits(
                batch=cfg.rollout_batch_size,
                queue_size=cfg.async_queue_size,
                in_flight=cfg.vllm_generate_batch_size,
                last_step=cfg.max_steps if cfg.max_steps > 0 else None,
                filter_rounds=cfg.dynamic_filtering_max_rounds,
                drained=not cfg.partial_rollout,
            )
            calls = self.system.engines.group_calls(cfg.n_samples_per_prompt, self.sampling, cfg.rollout_timeout)
            queue = RolloutQueue(self.stream, self.buffer, self._filter, limits, self._select)
            if self._counted is not None:
                queue.load_state_dict(self._counted)
            self._rollouts = AsyncRollouts(queue, calls, cfg.rollout_timeout)
        return self._rollouts

    def fit(self) -> None:
        """See :meth:`PPOTrainer.fit`."""
        try:
            super().fit()
        finally:
            if self._rollouts is not None:
                self._rollouts.close()

    def _finished(self) -> bool:
        return self._last_step_done()  # the end of the data is a step without groups

    def _roll_out(self) -> AsyncGroups:
        with self.console.phase("generate"):
            return self.rollouts.take()

    def _weights_may_change(self) -> AbstractContextManager[None]:
        return self.rollouts.holding(self.global_step, drain=not self.cfg.partial_rollout)

    def _sample_figures(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {**super()._sample_figures(trajectories), **staleness_metrics(trajectories, self.global_step)}

    def _client_state(self) -> dict[str, Any]:
        with self.rollouts.locked() as queue:
            unfinished = [item.group_id for item in queue.in_flight]
            own = {"data_loader_state_dict": self.stream.state_dict(unfinished), "queue": queue.state_dict()}
            return {**super()._client_state(), **own}

    def _load_client_state(self, state: Mapping[str, Any]) -> None:
        super()._load_client_state(state)
        self._counted = state.get("queue")  # a run without --async_train has none


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many versions old the sampled tokens are that ``version`` is trained on.

    Returns:
        ``rollout/staleness_mean`` and ``rollout/staleness_max`` over tokens, and ``rollout/mixed_version_rate``, the
        share of samples that a weight update interrupted.
    """
    versions = [t.weight_version[t.action_mask] for t in trajectories]
    ages = version - np.concatenate(versions)
    if not ages.size:
        return {}
    return {
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": float(ages.max()),
        "rollout/mixed_version_rate": float(np.mean([v.size > 0 and v.min() != v.max() for v in versions])),
    }
