"""Which Ray cluster a run takes, what the driver tells it, and what is noticed when it goes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf.cluster import ray_cluster
from openrlhf.cluster.placement import Group, PlacementError, PlacementPlan, Role, order_devices, plan_placement
from openrlhf.cluster.ray_cluster import Cluster, Device, forwarded_environment
from openrlhf.config import PPOConfig
from openrlhf.utils.process import chosen_threads


def job(**runtime_env: Any) -> dict[str, str]:
    """What `ray job submit` leaves in the environment of the command that it runs."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env, "metadata": {}})}


def test_variables_of_networks_and_threads_reach_all_processes() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "3"}
    assert forwarded_environment({**given, "HOME": "/root"}) == {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        **given,
    }


def test_what_the_job_sets_is_not_set_again() -> None:
    """Ray would end the run: it takes each variable from one of them only."""
    environ = {"HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/here"}
    got = forwarded_environment({**environ, **job(env_vars={"NCCL_DEBUG": "INFO", "PYTHONPATH": "/there"})})
    assert got == {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    for other in (job(), job(env_vars=None), job(working_dir="."), {}):
        assert forwarded_environment({"NCCL_DEBUG": "INFO", **other})["NCCL_DEBUG"] == "INFO"


def test_rays_one_thread_in_the_command_of_a_job_is_nobodys_choice() -> None:
    assert chosen_threads({}) is None
    assert chosen_threads({"OMP_NUM_THREADS": "1"}) == "1"
    assert chosen_threads({"OMP_NUM_THREADS": "1", **job()}) is None
    assert "OMP_NUM_THREADS" not in forwarded_environment({"OMP_NUM_THREADS": "1", **job()})
    assert chosen_threads({"OMP_NUM_THREADS": "4", **job()}) == "4"
    assert chosen_threads({"OMP_NUM_THREADS": "1", **job(env_vars={"OMP_NUM_THREADS": "1"})}) == "1"


def test_processes_that_share_the_cores_of_a_node() -> None:
    sizes = {f"{role}_num_gpus_per_node": 3 for role in ("actor", "critic", "ref")}
    plan = plan_placement(PPOConfig(advantage_estimator="gae", init_kl_coef=0.1, vllm_num_engines=1, **sizes), "GPU")
    nodes = {"actor": "AAB", "critic": "ABB", "ref": "BBB", "engine": "A"}
    group: Any = None
    devices = {name: [Device(group, 0, node, ("0",)) for node in places] for name, places in nodes.items()}
    cluster = Cluster(plan, devices)
    trained = {"actor", "critic"}
    assert [cluster.processes_beside("actor", rank, trained) for rank in range(3)] == [3, 3, 3]
    assert [cluster.processes_beside("critic", rank, trained) for rank in range(3)] == [3, 3, 3]
    assert [cluster.processes_beside("ref", rank, {"ref"}) for rank in range(3)] == [3, 3, 3]
    assert cluster.processes_beside("actor", 0, {"actor"}) == 2 and cluster.processes_beside("actor", 2, {"actor"}) == 1


@pytest.mark.parametrize("given", ["", "auto"])
def test_only_a_cluster_that_is_for_everybody_is_joined(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray start` writes its address down; one that a run started for itself is in no file."""
    monkeypatch.setattr(ray_cluster, "read_ray_address", lambda: None)
    assert ray_cluster._cluster_address(given) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(ray_cluster, "read_ray_address", lambda: address)
        assert ray_cluster._cluster_address(given) == address
        assert ray_cluster._cluster_address("local") is None
        assert ray_cluster._cluster_address("head:6379") == "head:6379"
    assert ray_cluster._cluster_address(given) is None, "what a crashed cluster left in the file"


@pytest.mark.parametrize(
    ("given", "origin"),
    [("head:6379", "RAY_ADDRESS"), ("", "which an earlier `ray start` on this machine wrote down")],
)
def test_an_address_where_nothing_is_is_explained(given: str, origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setattr(ray_cluster, "read_ray_address", lambda: "head:6379")
    monkeypatch.setattr(ray_cluster, "_answers", lambda _: True)
    monkeypatch.setattr(ray_cluster.ray, "init", refuse)
    with pytest.raises(ray_cluster.ClusterError, match=r"RAY_ADDRESS=local") as caught:
        ray_cluster.connect()
    assert str(caught.value).startswith(f"there is no Ray cluster at head:6379 ({origin}): no answer. Start it with")


PRIVATE = """
import os, signal, sys, time
import psutil
from openrlhf.cluster import ray_cluster
ray_cluster.read_ray_address = lambda: None
print(ray_cluster.connect(), os.environ["RAY_IGNORE_UNHANDLED_ERRORS"])
print(ray_cluster._cluster_address("auto"), ray_cluster.cluster_gone())
for process in psutil.Process().children():
    if process.name() in ("gcs_server", "raylet"):
        process.terminate()
ended = time.monotonic()
while not ray_cluster.cluster_gone():
    time.sleep(0.1)
started = time.monotonic()
# Ray ends a process that is left a minute without its cluster: a failure tells in which part that was.
print(f"gone after {started - ended:.1f} s", file=sys.stderr, flush=True)
ray_cluster.disconnect()
print("left" if time.monotonic() - started < 30 else "waited", ray_cluster.cluster_gone())
"""


@pytest.mark.e2e
def test_a_ray_of_its_own_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = subprocess.run([sys.executable, "-c", PRIVATE], capture_output=True, text=True, timeout=400)
    assert run.stdout.splitlines() == ["Ray: started for this run 1", "None False", "left False"], (
        run.stdout + run.stderr
    )


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_processes_see_gpus_of_the_outer_list_only(colocated: bool, size: int) -> None:
    """Of CUDA_VISIBLE_DEVICES=2,3,5,7 each process has its own, but for those that share them on purpose."""
    actor, engine = Role("actor", 4 if colocated else 2), Role("engine", (4 if colocated else 2) // size, size)
    groups = (Group((actor, engine)),) if colocated else (Group((actor,)), Group((engine,)))
    left = ["5", "2", "7", "3"]  # in no order: bundles are where Ray puts them
    devices = {}
    for group in groups:
        found = [("node", [left.pop() for _ in range(group.bundle_devices)]) for _ in range(group.bundles)]
        places = order_devices(found, group.bundle_devices)
        devices[group.name] = [Device(None, *place) for place in places]  # type: ignore[arg-type]
    cluster = Cluster(PlacementPlan(groups, "GPU"), devices)
    seen = {
        role.name: [str(cluster.visible_devices(role.name, i)).split(",") for i in range(role.processes)]
        for role in (actor, engine)
    }
    assert {len(own) for own in seen["actor"]} == {1} and {len(own) for own in seen["engine"]} == {size}
    actors, engines = (sum(seen[name], []) for name in ("actor", "engine"))
    if colocated:  # ranks beside each other have the GPUs of one engine, in its order
        assert actors == engines and sorted(actors) == ["2", "3", "5", "7"]
    else:
        assert sorted(actors + engines) == ["2", "3", "5", "7"]


def test_a_node_that_starts_no_process_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(probes: list[Any], timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError(f"{len(probes)} of {len(probes)} after {timeout} s")

    probe = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(ray_cluster._look_around, "options", lambda **options: probe)
    monkeypatch.setattr(ray_cluster.ray, "get", late)
    group = Group((Role("actor", 2),))
    placed: Any = SimpleNamespace(bundle_count=2)
    with pytest.raises(PlacementError, match=r"group 'actor' .* --start_timeout"):
        ray_cluster._sorted_devices(PlacementPlan((group,), "GPU"), group, placed, 0.0)
