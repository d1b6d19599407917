"""The sending side of a weight transfer: deadlines, failures by name and at once, group ranks of several engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, WeightTransferInitRequest
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from openrlhf.cluster import group
from openrlhf.cluster.group import Member, WorkerError, WorkerGroup
from openrlhf.engines.weight_sync import sender
from openrlhf.engines.weight_sync.sender import EngineClient, WeightSender, _init_info, until_failure


@ray.remote(num_cpus=0)
class FakeEngine:
    def __init__(self) -> None:
        self.released = threading.Event()

    def become(self, mode: str, request: Any) -> None:
        self.released.set()
        self.released = threading.Event()
        self.mode = mode
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request.init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        if self.mode == "raise":
            raise RuntimeError("shape mismatch in parameter 3")
        if self.mode == "hang":
            self.released.wait(300)
        self.calls.append(request.update_info)

    def finish_weight_update(self, weight_version: int) -> None:
        self.calls.append(("finish", weight_version))

    def seen(self) -> list[Any]:
        return self.calls


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Any]]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield [FakeEngine.options(max_concurrency=2).remote() for _ in range(2)]
    ray.shutdown()


def engines(processes: list[Any], *modes: str, timeout: float = 200) -> WorkerGroup:
    """Engines that answer already, so that the deadlines below measure the calls alone."""
    chosen = processes[: len(modes)]
    # The first request makes each process import vLLM, which takes its time.
    request = WeightTransferInitRequest()
    ray.get([p.become.remote(mode, request) for p, mode in zip(chosen, modes, strict=True)], timeout=300)
    return WorkerGroup("engine", [Member(f"engine {i}", p, f"engine-{i}.log") for i, p in enumerate(chosen)], timeout)


@pytest.mark.slow
def test_every_engine_gets_every_call_and_its_own_ranks(processes: list[Any]) -> None:
    chosen = engines(processes, "ok", "ok")
    client = EngineClient(chosen, workers_per_engine=2)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.weight_version = 7
    client.finish_weight_update()
    seen = chosen.call("seen")
    assert [calls[0]["rank_offset"] for calls in seen] == [1, 3]
    # One sync is three calls an engine, however many parameters there are.
    assert all(calls[1:] == ["start", {"names": ["w"]}, ("finish", 7)] for calls in seen)
    assert not client.failure.done()


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", ["ok", "hang"])
def test_a_failing_engine_is_named_with_its_error_at_once(processes: list[Any], neighbour: str) -> None:
    """Its neighbour may wait for it in a broadcast, and would do so for ever."""
    chosen = engines(processes, neighbour, "raise")
    client = EngineClient(chosen, workers_per_engine=1)
    started = time.monotonic()
    message = r"(?s)update_weights failed in engine 1.*shape mismatch in parameter 3.*Last lines of engine-1.log"
    with pytest.raises(WorkerError, match=message) as failed:
        client.update_weights({})
    assert time.monotonic() - started < 60
    assert client.failure.exception() is failed.value


@pytest.mark.slow
def test_a_silent_engine_is_named_within_the_limit(processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    wait = ray.wait

    def counting(calls: list[Any], **options: Any) -> Any:
        """The limit may be over when the other engine has answered."""
        done, left = wait(calls, **options)
        clock.now += 0.0 if done or len(left) == 2 else options["timeout"]
        return done, left

    monkeypatch.setattr(group.ray, "wait", counting)
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: clock.now))
    client = EngineClient(engines(processes, "hang", "ok", timeout=2), workers_per_engine=1)
    with pytest.raises(WorkerError, match=r"update_weights did not finish within 2 s in engine 0\."):
        client.update_weights({})


class Source(WeightSource):
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("w", torch.float32, (2,))]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.ones(2)


class FailingClient(EngineClient):
    """Its engines fail a moment after the broadcast has begun, or has broken."""

    def __init__(self) -> None:
        super().__init__(WorkerGroup("engine", [], 60), 1)

    def _call(self, method: str, *args: Any, per_rank: Any = None) -> None:
        if method == "update_weights":
            time.sleep(0.2)
            error = WorkerError("update_weights failed in engine 0: CUDA out of memory")
            self.failure.set_exception(error)
            raise error


class Nccl(NCCLTrainerWeightTransferEngine):
    """vLLM's own order of steps, around a broadcast whose end is the test's."""

    def __init__(self, client: EngineClient, broadcast: Callable[[], None]) -> None:
        super().__init__(client=client, source=Source())
        self._do_broadcast = broadcast

    def _broadcast(self, source: Any, meta: Any) -> None:
        self._do_broadcast()

    @staticmethod
    def _post_send_sync() -> None:
        """Asks for a GPU."""


def _broken() -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("how", ["hangs", "breaks"])
def test_the_error_of_an_engine_ends_a_broadcast_that_can_not(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "REASON_SECONDS", 60.0)
    release = threading.Event()
    client = FailingClient()
    started = time.monotonic()
    try:
        broadcast = _broken if how == "breaks" else lambda: release.wait(120)
        with pytest.raises(WorkerError, match="engine 0: CUDA out of memory"):
            WeightSender(Nccl(client, broadcast), client).send(3)  # type: ignore[arg-type]
        assert time.monotonic() - started < 50
    finally:
        release.set()


def test_an_error_of_the_trainer_itself_and_a_result_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "REASON_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        until_failure(_broken, Future())
    assert until_failure(lambda: threading.current_thread().daemon, Future()) is True


def test_connecting_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never joins is told while the run starts, not when an episode's time is over."""
    limits: list[float | None] = []

    class Recording(WorkerGroup):
        def call(self, method: str, *args: Any, per_rank: Any = None, timeout: float | None = None) -> list[Any]:
            limits.append(timeout)
            return []

    def connect(info: Any, client: EngineClient, source: WeightSource) -> Any:
        client.init_weight_transfer_engine({})
        return type("Transfer", (), {"send_weights": staticmethod(client.start_weight_update)})()

    monkeypatch.setattr(sender.WeightTransferTrainerFactory, "trainer_init", connect)
    chosen = Recording("engine", [], 70.0)
    options = {"workers_per_engine": 1, "rank": 0, "timeout": 30.0}
    sender.open_sender("ipc", Source(), chosen, **options).send(1)  # type: ignore[arg-type]
    assert limits == [30.0, 70.0]


def test_nccl_takes_little_room_beside_an_engine_and_ipc_holds_the_largest_weight() -> None:
    mib = 1024 * 1024
    for largest, ipc in ((100 * mib, 1024 * mib), (2500 * mib, 2500 * mib)):
        sizes = {t: _init_info(t, 0, 4, largest, 60.0) for t in ("nccl", "ipc")}
        assert sizes["nccl"].packed_buffer_size_bytes == 256 * mib  # type: ignore[attr-defined]
        assert sizes["ipc"].packed_buffer_size_bytes == ipc  # type: ignore[attr-defined]
