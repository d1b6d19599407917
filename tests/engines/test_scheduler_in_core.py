"""The scheduler in vLLM's own core loop, also with a step ahead of the GPU: nothing lost, twice, or misnamed."""

from __future__ import annotations

import pytest
from engine_core import MODES, Core, made_core, random_work, update
from vllm.v1.engine import FinishReason

from openrlhf.utils.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(params=MODES)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str) -> Core:
    return made_core(monkeypatch, model, request.param)


def test_nothing_is_lost_or_misnamed_in_pauses(core: Core) -> None:
    preempted = random_work(core)
    assert preempted and core.executor.version > 20
    several = sum(asked.messages > 1 for asked in core.requests.values())
    assert several > 20 and sum(asked.messages == 1 for asked in core.requests.values()) > 5 * several / 2


def test_nothing_is_kept_of_what_a_sleeping_engine_aborts(core: Core) -> None:
    core.core.set_weight_version("0")
    names = [core.add(20, 50, 40, string=True) for _ in range(6)]
    core.turn(12)
    assert any(kept.waits for kept in core.scheduler._kept.values())
    core.wait(core.call("pause_scheduler", "abort", True))
    assert [core.requests[name].end for name in names] == [FinishReason.ABORT] * 6
    assert not core.scheduler._kept and not core.scheduler._watches
    later = core.add(5, 5)
    core.turn(5)
    update(core, clear=True)
    core.wait(core.call("resume_scheduler"))
    core.finish()
    assert core.requests[later].tokens == [1000, 1001, 1002, 1003, 1004] and core.requests[later].messages == 1
