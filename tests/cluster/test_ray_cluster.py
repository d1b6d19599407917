"""What the driver tells Ray."""

from __future__ import annotations

import json
from typing import Any

from openrlhf.cluster.ray_cluster import forwarded_environment


def job(**runtime_env: Any) -> dict[str, str]:
    """What `ray job submit` leaves in the environment of the command that it runs."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env, "metadata": {}})}


def test_variables_of_networks_and_threads_reach_all_processes() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "GLOO_SOCKET_IFNAME": "eth0"}
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
