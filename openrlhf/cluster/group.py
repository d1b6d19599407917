"""All ranks of one role as one thing to call: coarse remote calls with deadlines and readable failures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from openrlhf.cluster.ray_cluster import cluster_gone
from openrlhf.utils import interrupts
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.process import tail

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NESTED_SECONDS = 300.0
"""So much longer than a process may wait for others, others wait for it: its wait ends first, and names the missing."""


class WorkerError(ExplainedError, RuntimeError):
    """A process of a role failed or did not answer in time; the message ends with the end of its log."""


@dataclass(frozen=True)
class Member:
    """One process of a role."""

    name: str
    handle: ActorHandle
    log_file: str

    def log_excerpt(self) -> str:
        """The end of the process's log, for error messages."""
        text = "\n".join("  | " + line for line in tail(self.log_file).splitlines())
        return f"Last lines of {self.log_file}:\n{text}"


class PendingCall:
    """A call that every member is working on; of ``copies`` members next to each other, the first answers."""

    def __init__(self, method: str, calls: dict[ray.ObjectRef, Member], copies: int = 1) -> None:
        self._method = method
        self._calls = calls
        self._copies = copies

    @classmethod
    def results(cls, pending: Sequence[PendingCall], timeout: float) -> list[list[Any]]:
        """The answers of several calls, a list each; the first failure of any is raised at once, as in :meth:`result`.

        Raises:
            WorkerError: a member failed, died, or did not answer within ``timeout`` seconds.
        """
        calls = {call: member for one in pending for call, member in one._calls.items()}
        answers = cls(" / ".join(dict.fromkeys(one._method for one in pending)), calls)._wait(timeout)
        return [one._pick(answers) for one in pending]

    def result(self, timeout: float) -> list[Any]:
        """The members' answers, in their order.

        The first failure is raised at once: its neighbours may be waiting for it in a collective.

        Raises:
            WorkerError: a member failed, died, or did not answer within ``timeout`` seconds.
        """
        return self._pick(self._wait(timeout))

    def _pick(self, answers: dict[ray.ObjectRef, Any]) -> list[Any]:
        return [answers[call] for call in list(self._calls)[:: self._copies]]

    def _wait(self, timeout: float) -> dict[ray.ObjectRef, Any]:
        deadline = time.monotonic() + timeout
        answers: dict[ray.ObjectRef, Any] = {}
        waiting = list(self._calls)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=min(left, interrupts.POLL_SECONDS))
            interrupts.check()
            if not done and left > interrupts.POLL_SECONDS:
                continue
            if not done:
                late = [self._calls[call] for call in waiting]
                raise WorkerError(
                    f"{self._method} did not finish within {timeout:g} s in {', '.join(m.name for m in late)}.\n"
                    + late[0].log_excerpt()
                )
            for call in done:
                answers[call] = self._get(call)
        return answers

    def _get(self, call: ray.ObjectRef) -> Any:
        member = self._calls[call]
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            explained = isinstance(cause, ExplainedError) and not cause.needs_log
            # The end of a log would bury a message that says all by itself.
            log = f"Its log is {member.log_file}" if explained else member.log_excerpt()
            raise WorkerError(f"{self._method} failed in {member.name}: {_short(cause)}\n{log}") from error
        except ray.exceptions.RayError as error:
            if cluster_gone():
                raise WorkerError(
                    f"the Ray cluster of this run is gone, and {member.name} with it (during {self._method}): it was "
                    "stopped (`ray stop`), or its node went down"
                ) from error
            raise WorkerError(
                f"{member.name} died during {self._method}: {str(error).splitlines()[0]}\n{member.log_excerpt()}"
            ) from error


def _short(error: BaseException) -> str:
    """Type and message; of an error that Ray could only carry as a traceback, its last line."""
    text = str(error).strip()
    if isinstance(error, ray.exceptions.RayError):
        return next((line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
    return f"{type(error).__name__}: {text}"


class WorkerGroup:
    """The processes of one role.

    Args:
        role: for messages.
        members: in rank order.
        timeout: seconds that a call may take unless it says otherwise.
        data_copies: neighbouring ranks that work on the same data, and share a model or its sequences.
    """

    def __init__(self, role: str, members: Sequence[Member], timeout: float, data_copies: int = 1) -> None:
        self.role = role
        self.members = list(members)
        self.timeout = timeout
        self.data_copies = data_copies

    def __len__(self) -> int:
        return len(self.members)

    def submit(self, method: str, *args: Any, per_rank: Sequence[Any] | None = None) -> PendingCall:
        """Start a method in every member.

        Args:
            method: its name.
            args: the same for all.
            per_rank: if given, one more first argument, each for ``data_copies`` neighbouring members; of their
                answers, which are the same, the first counts.
        """
        copies = self.data_copies
        if per_rank is not None and len(per_rank) * copies != len(self.members):
            shared = f", of which {copies} share each" if copies > 1 else ""
            raise ValueError(f"{len(per_rank)} per-rank arguments for {len(self.members)} {self.role} ranks{shared}")
        if per_rank is not None and copies > 1:
            per_rank = [ray.put(value) for value in per_rank]  # once for all that get it
        calls = {}
        for rank, member in enumerate(self.members):
            own = () if per_rank is None else (per_rank[rank // copies],)
            calls[getattr(member.handle, method).remote(*own, *args)] = member
        return PendingCall(method, calls, 1 if per_rank is None else copies)

    def call(
        self, method: str, *args: Any, per_rank: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """:meth:`submit` and wait; the answers in rank order."""
        return self.submit(method, *args, per_rank=per_rank).result(self.timeout if timeout is None else timeout)

    def submit_first(self, method: str, *args: Any) -> PendingCall:
        """Start a method of the first member only."""
        member = self.members[0]
        return PendingCall(method, {getattr(member.handle, method).remote(*args): member})

    def kill(self) -> None:
        """End all members at once, whatever they are doing."""
        for member in self.members:
            ray.kill(member.handle, no_restart=True)
