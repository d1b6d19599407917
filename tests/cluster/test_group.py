"""Waiting for several processes: their answers in order, and the first failure of any at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from openrlhf.cluster import group
from openrlhf.cluster.group import Member, PendingCall, WorkerError, WorkerGroup
from openrlhf.rollout.errors import EngineError, RewardError

FOREVER = object()


class Clock:
    """Stands for the module time; it goes on while somebody waits in vain."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(group, "time", clock)
    return clock


def pending(method: str, outcomes: list[Any], monkeypatch: pytest.MonkeyPatch, copies: int = 1) -> PendingCall:
    """A call whose members answer, fail, or never do either (for calls of which some don't, with the clock)."""
    refs = {f"{method}-{i}": outcome for i, outcome in enumerate(outcomes)}
    known: dict[str, Any] = getattr(group.ray, "outcomes", {}) | refs

    def wait(waiting: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        done = [ref for ref in waiting if known[ref] is not FOREVER][:num_returns]
        if not done:
            group.time.now += timeout  # type: ignore[attr-defined]
        return done, [ref for ref in waiting if ref not in done]

    def get(ref: str) -> Any:
        if isinstance(known[ref], Exception):
            raise known[ref]
        return known[ref]

    for name, value in {"outcomes": known, "wait": wait, "get": get}.items():
        monkeypatch.setattr(group.ray, name, value, raising=False)
    members: dict[Any, Member] = {ref: Member(ref.replace("-", " rank "), None, "missing.log") for ref in refs}
    return PendingCall(method, members, copies)


def test_answers_of_several_calls_are_a_list_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [pending("forward", [1, 1, 2, 2], monkeypatch, copies=2), pending("load", ["a", "b"], monkeypatch)]
    assert PendingCall.results(calls, 5.0) == [[1, 2], ["a", "b"]]
    assert [call.result(5.0) for call in calls] == [[1, 2], ["a", "b"]]
    assert PendingCall.results([], 5.0) == []


def test_a_failure_is_not_kept_waiting_by_a_call_before_it(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    error = RayTaskError("train", "traceback", ValueError("loss is NaN"))
    calls = [pending("actor", [FOREVER], monkeypatch), pending("critic", [3, error], monkeypatch)]
    with pytest.raises(WorkerError, match=r"failed in critic rank 1: ValueError: loss is NaN"):
        PendingCall.results(calls, 30.0)
    assert clock.now == 0


def failure(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(WorkerError) as caught:
        pending("run_group", [error], monkeypatch).result(5.0)
    return str(caught.value)


def test_a_message_that_says_all_is_not_buried_under_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    told = failure(RayTaskError("run_group", "traceback", RewardError("r.py:3 raised")), monkeypatch)
    assert told == "run_group failed in run_group rank 0: RewardError: r.py:3 raised\nIts log is missing.log"
    for cause in (EngineError("vLLM stopped"), ValueError("not ours")):
        told = failure(RayTaskError("run_group", "traceback", cause), monkeypatch)
        assert f"{cause}\nLast lines of missing.log" in told


def test_the_end_of_the_cluster_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    died = RayActorError(error_msg="The actor died")
    assert failure(died, monkeypatch).startswith("run_group rank 0 died during run_group: The actor died\nLast lines")
    monkeypatch.setattr(group, "cluster_gone", lambda: True)
    assert failure(died, monkeypatch).startswith("the Ray cluster of this run is gone, and run_group rank 0 with it")


def test_calls_share_one_deadline(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    calls = [pending(name, [FOREVER], monkeypatch) for name in ("load", "start")]
    with pytest.raises(WorkerError, match=r"load / start did not finish within 7 s in load rank 0, start rank 0"):
        PendingCall.results(calls, 7.0)
    assert clock.now == 7.0


def test_what_neighbouring_members_share_is_put_into_the_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[str] = []
    got: list[tuple[Any, ...]] = []

    class Method:
        def remote(self, *arguments: Any) -> int:
            got.append(arguments)
            return len(got)

    def store(value: str) -> str:
        put.append(value)
        return f"<{value}>"

    monkeypatch.setattr(group.ray, "put", store)
    members = [Member(f"actor {i}", SimpleNamespace(train=Method()), "log") for i in range(4)]  # type: ignore[arg-type]
    WorkerGroup("actor", members, 5.0, data_copies=2).submit("train", 7, per_rank=["a", "b"])
    assert put == ["a", "b"] and got == [("<a>", 7), ("<a>", 7), ("<b>", 7), ("<b>", 7)]
    WorkerGroup("actor", members[:2], 5.0).submit("train", per_rank=["a", "b"])
    assert put == ["a", "b"] and got[4:] == [("a",), ("b",)]
