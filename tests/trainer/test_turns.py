"""Around a weight sync: what leaves the GPUs for the engines, cheapest first and no more than needed; time limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from scripted_run import Done, Policy, config

from openrlhf.cluster.group import NESTED_SECONDS, WorkerGroup
from openrlhf.platform import MemoryStats
from openrlhf.trainer.system import PPOSystem, connect_engines
from openrlhf.trainer.turns import GIB, SharedMemory

TOTAL = 80 * int(GIB)


class Gpus:
    """Free memory of each GPU in GiB."""

    def __init__(self, *free: float) -> None:
        self.free = list(free)


class Models:
    """Stands for a group: what it holds on each GPU goes and comes with its calls."""

    def __init__(self, name: str, gpus: Gpus, size: float, log: list[str]) -> None:
        self.name, self.gpus, self.size, self.log = name, gpus, size, log

    def submit(self, method: str) -> Any:
        return Done(self.call(method))

    def call(self, method: str) -> list[Any]:
        if method in ("offload", "reload"):
            self.log.append(f"{method} {self.name}")
            sign = 1 if method == "offload" else -1
            self.gpus.free = [free + sign * self.size for free in self.gpus.free]
        if method == "memory":
            return [
                MemoryStats(int(self.size * GIB), 2, 3, int(free * GIB), TOTAL, int(2 * self.size * GIB))
                for free in self.gpus.free
            ]
        return [(int(free * GIB), TOTAL) for free in self.gpus.free]


@pytest.mark.parametrize(
    ("free", "cache", "gone"),
    [
        ((45.0, 46.0), None, []),  # 0.6 x 80 - 3 of weights = 45 are needed
        ((46.0, 44.9), None, ["offload ref"]),  # the fuller GPU decides
        ((42.0, 42.0), None, ["offload ref"]),
        ((41.0, 50.0), None, ["offload ref", "offload actor"]),
        ((1.0, 1.0), None, ["offload ref", "offload actor"]),
        ((27.0, 30.0), 24.0, []),  # the cache and 3 to work with
        ((27.0, 26.9), 24.0, ["offload ref"]),
    ],
)
def test_models_go_one_by_one_until_the_share_of_the_engines_is_free(
    tmp_path: Path, free: tuple[float, float], cache: float | None, gone: list[str]
) -> None:
    cfg = replace(config(tmp_path), vllm_enable_sleep=True, vllm_gpu_memory_utilization=0.6, vllm_kv_cache_gib=cache)
    gpus, log = Gpus(*free), []
    memory = SharedMemory(cfg, [Models("ref", gpus, 3, log), Models("actor", gpus, 21, log)])  # type: ignore[list-item]
    memory.make_room(3 * int(GIB))
    assert log == gone
    memory.make_room(3 * int(GIB))  # already made
    memory.bring_back()
    memory.bring_back()
    assert log == gone + [entry.replace("offload", "reload") for entry in gone]
    assert gpus.free == list(free)


class Engines:
    """Stands for the pool: an engine that sleeps, and takes its weights and its cache when it is woken."""

    workers_per_engine = 1
    group: WorkerGroup

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def wake(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")


def test_caches_of_training_are_given_back_before_an_engine_takes_its_weights(tmp_path: Path) -> None:
    """A training step had left 65 of 79 GiB cached, and the engine found no room for its weights."""
    cfg = replace(config(tmp_path), vllm_enable_sleep=True, deepspeed_enable_sleep=True)
    actor = Policy()
    actor.answers |= {"room": (0, TOTAL), "weight_bytes": 3 * int(GIB)}
    engines = Engines(actor.calls)
    PPOSystem(cfg, None, engines, actor, None, None, None).sync_weights([1, 2], 1)  # type: ignore[arg-type]
    order = [
        "room",
        "wake weights",
        "sync_weights",
        "probe",
        "weight_bytes",
        "room",
        "room",
        "offload",
        "wake kv_cache",
    ]
    assert actor.calls == order


def test_what_a_transfer_cached_is_given_back_also_where_models_stay(tmp_path: Path) -> None:
    cfg = replace(config(tmp_path), vllm_enable_sleep=True, deepspeed_enable_sleep=False)
    actor = Policy()
    engines = Engines(actor.calls)
    PPOSystem(cfg, None, engines, actor, None, None, None).sync_weights([1, 2], 1)  # type: ignore[arg-type]
    assert actor.calls == ["room", "wake weights", "sync_weights", "probe", "room", "wake kv_cache"]


def test_an_engine_that_hangs_is_named_before_the_driver_gives_the_actor_up(tmp_path: Path) -> None:
    """The actor waits for engines as long as the flags say, from some moment on after the driver began to wait."""
    cfg, actor, engines = replace(config(tmp_path), rollout_timeout=70.0), Policy(), Engines([])
    engines.group = WorkerGroup("engine", [], cfg.rollout_timeout)
    system = PPOSystem(cfg, None, engines, actor, None, None, None)  # type: ignore[arg-type]
    connect_engines(system, "gloo", 30.0)
    system.sync_weights([1, 2], 1)
    assert actor.timeouts["connect_engines"] == 30.0 + NESTED_SECONDS
    assert actor.timeouts["sync_weights"] == 70.0 + NESTED_SECONDS


def test_engines_that_never_sleep_need_no_room(tmp_path: Path) -> None:
    gpus, log = Gpus(0.5), []
    SharedMemory(config(tmp_path), [Models("actor", gpus, 21, log)]).make_room(0)  # type: ignore[list-item]
    assert log == []


def test_the_figures_of_a_phase_are_the_worst_process(tmp_path: Path) -> None:
    gpus = Gpus(7.0, 5.0)
    memory = SharedMemory(config(tmp_path), [Models("a", gpus, 3, []), Models("b", gpus, 21, [])])  # type: ignore[list-item]
    figures = memory.figures("train")
    assert figures["memory/train_allocated_gib"] == 21 and figures["memory/train_free_gib"] == 5
    assert figures["memory/train_reserved_gib"] == 2 / GIB and figures["memory/train_peak_gib"] == 3 / GIB
    assert figures["memory/train_host_gib"] == 42


def test_the_memory_of_the_driver_and_of_rays_objects_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"cluster_resources": 7 * GIB, "available_resources": 4 * GIB}
    for name, size in resources.items():
        monkeypatch.setattr(ray, name, lambda size=size: {"CPU": 1.0, "object_store_memory": size})
    alone = PPOSystem.host_memory()
    assert set(alone) == {"memory/driver_host_gib"} and 0.01 < alone["memory/driver_host_gib"] < 64
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert PPOSystem.host_memory()["memory/object_store_gib"] == 3
    monkeypatch.setattr(ray, "cluster_resources", lambda: 1 / 0)
    assert set(PPOSystem.host_memory()) == set(alone)
