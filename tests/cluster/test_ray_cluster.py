"""What the driver tells Ray."""

from __future__ import annotations

import json
from typing import Any

from openrlhf.cluster.placement import plan_placement
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
