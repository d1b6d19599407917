"""How long the ranks of a role may take to meet, and how long what they do together later."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from openrlhf.cluster.group import NESTED_SECONDS, PendingCall, WorkerGroup
from openrlhf.utils.network import GLOO_INTERFACE, address_towards, interface_of
from openrlhf.workers.model_worker import form_groups
from openrlhf.workers.rendezvous import join_group, open_store


@pytest.fixture
def no_group_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MASTER_ADDR", "MASTER_PORT", GLOO_INTERFACE):
        monkeypatch.setenv(name, "")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_afterwards")
def test_a_short_rest_of_the_start_does_not_become_the_deadline_of_the_run() -> None:
    store = open_store("127.0.0.1", 1)
    join_group(0, 1, "127.0.0.1", store.port, join_timeout=60.0, timeout=1234.0, store=store)
    group: Any = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=1234)
    # Later communicators meet over the store.
    assert store.timeout == timedelta(seconds=1234)


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections(kind="inet")
    return {(str(c.laddr.ip), c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.usefixtures("no_group_afterwards")
@pytest.mark.parametrize("chosen", [False, True])
def test_gloo_listens_where_the_ranks_meet(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """Not where the host's own name leads, which other hosts may not reach; unless the user says where."""
    try:
        host = address_towards("10.255.255.255")
    except OSError:
        pytest.skip("no network")
    if chosen:
        monkeypatch.setenv(GLOO_INTERFACE, str(interface_of("127.0.0.1")))
    store = open_store(host, 1)
    before = listening()
    join_group(0, 1, host, store.port, join_timeout=60.0, timeout=60.0, store=store)
    assert {address for address, _ in listening() - before} == {"127.0.0.1" if chosen else host}


@pytest.mark.usefixtures("no_group_afterwards")
def test_a_store_that_is_not_there_is_given_up_within_the_time_to_join() -> None:
    with pytest.raises(dist.DistError, match="1000ms|timed out"):
        join_group(1, 2, "127.0.0.1", 1, join_timeout=1.0, timeout=1234.0)


def test_collectives_of_a_role_may_take_as_long_as_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerGroup("actor", [], timeout=3600.0)
    submitted: list[Any] = []
    monkeypatch.setattr(group, "submit_first", lambda method: PendingCall(method, {}))
    monkeypatch.setattr(PendingCall, "results", lambda calls, timeout: [[("host", 12)]])
    monkeypatch.setattr(group, "submit", lambda *call: submitted.append(call))
    form_groups([group], 7.0)
    assert submitted == [("join", "host", 12, 7.0, 3600.0 + NESTED_SECONDS)]
