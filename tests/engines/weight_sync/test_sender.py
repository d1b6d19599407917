"""Control calls of a weight transfer: deadlines, failures by name, group ranks of several engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

from openrlhf.engines.weight_sync.sender import EngineClient, WeightSyncError


@ray.remote(num_cpus=0)
class FakeEngine:
    def become(self, mode: str, request: Any) -> None:
        self.mode = mode
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request.init_info)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        import time

        if self.mode == "raise":
            raise RuntimeError("shape mismatch in parameter 3")
        if self.mode == "hang":
            time.sleep(60)
        self.calls.append(request.update_info)

    def finish_weight_update(self, weight_version: int) -> None:
        self.calls.append(("finish", weight_version))

    def seen(self) -> list[Any]:
        return self.calls


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Any]]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield [FakeEngine.remote() for _ in range(2)]
    ray.shutdown()


def engines(processes: list[Any], *modes: str) -> list[Any]:
    """Engines that answer already, so that the deadlines below measure the calls alone."""
    chosen = processes[: len(modes)]
    # The first request makes each process import vLLM, which takes longer than those deadlines.
    request = WeightTransferInitRequest()
    ray.get([p.become.remote(mode, request) for p, mode in zip(chosen, modes, strict=True)], timeout=300)
    return chosen


@pytest.mark.slow
def test_every_engine_gets_every_call_and_its_own_ranks(processes: list[Any]) -> None:
    chosen = engines(processes, "ok", "ok")
    client = EngineClient(chosen, workers_per_engine=2, timeout=20)
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 5})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.weight_version = 7
    client.finish_weight_update()
    seen = ray.get([engine.seen.remote() for engine in chosen])
    assert [calls[0]["rank_offset"] for calls in seen] == [1, 3]
    # One sync is three calls an engine, however many parameters there are.
    assert all(calls[1:] == ["start", {"names": ["w"]}, ("finish", 7)] for calls in seen)


@pytest.mark.slow
def test_a_failing_engine_is_named_with_its_error(processes: list[Any]) -> None:
    client = EngineClient(engines(processes, "ok", "raise"), workers_per_engine=1, timeout=20)
    with pytest.raises(WeightSyncError, match=r"(?s)update_weights failed in engine 1.*shape mismatch in parameter 3"):
        client.update_weights({})


@pytest.mark.slow
def test_a_silent_engine_is_named_within_the_limit(processes: list[Any]) -> None:
    client = EngineClient(engines(processes, "hang", "ok"), workers_per_engine=1, timeout=2)
    with pytest.raises(WeightSyncError, match="update_weights did not finish in engine 0 within 2 s"):
        client.update_weights({})
