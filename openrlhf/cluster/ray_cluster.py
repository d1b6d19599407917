"""Connecting to Ray and turning a placement plan into placement groups."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.utils import read_ray_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from openrlhf.cluster.placement import Group, PlacementError, PlacementPlan, check_fits, order_devices
from openrlhf.utils import interrupts
from openrlhf.utils.errors import ExplainedError
from openrlhf.utils.process import THREADS, chosen_threads, job_variables

FORWARDED_VARIABLES = ("TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "PYTHONPATH")
FORWARDED_PREFIXES = ("NCCL_", "GLOO_")


class ClusterError(ExplainedError, ConnectionError):
    """There is no Ray cluster where one was said to be."""


_LOOK = ("", "auto")
"""Values of RAY_ADDRESS that name no cluster: the one that `ray start` wrote down is looked for."""

_address: str | None = None
"""Where the control store (GCS) of the present cluster is; None while not connected."""


def connect() -> str:
    """Connect to the cluster of ``RAY_ADDRESS``, else to one that ``ray start`` made on this machine, else start one.

    ``RAY_ADDRESS=local`` always starts one. One that another run started for itself is never taken: it ends with that
    run. One of ``ray start --temp-dir``, or of a shell with another ``TMPDIR`` or ``RAY_TMPDIR``, has written its
    address where it is not looked for, and is joined with ``RAY_ADDRESS`` only.

    Returns:
        A line that says which.

    Raises:
        ClusterError: no cluster answers at the address, which the message gives with its origin.
    """
    global _address
    if ray.is_initialized():
        return "Ray: connected before"
    # Of several groups that fail, the first is reported; Ray would print a traceback for each of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": forwarded_environment(os.environ)},
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    given = os.environ.get("RAY_ADDRESS", "")
    joined = _cluster_address(given)
    # Ray puts a handler of its own for SIGTERM in the place of ours.
    with interrupts.kept():
        context = _start(options) if joined is None else _join(joined, given, options)
    _address = getattr(context, "address_info", {}).get("gcs_address")
    return "Ray: started for this run" if joined is None else f"Ray: joined the cluster at {joined}"


def forwarded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the driver gives to all processes of a run.

    Those that ``ray job submit`` has for the job reach them anyway, and Ray refuses to be told one twice.

    Args:
        environ: the driver's environment.
    """
    chosen = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}
    for name, value in environ.items():
        if name in FORWARDED_VARIABLES or name.startswith(FORWARDED_PREFIXES):
            chosen[name] = value
    threads = chosen_threads(environ)
    if threads is not None:
        chosen[THREADS] = threads
    of_the_job = job_variables(environ)
    return {name: value for name, value in chosen.items() if name not in of_the_job}


def _join(address: str, given: str, options: dict[str, Any]) -> Any:
    try:
        return ray.init(address=address, **options)
    except ConnectionError as error:
        origin = "which an earlier `ray start` on this machine wrote down" if given in _LOOK else "RAY_ADDRESS"
        raise ClusterError(
            f"there is no Ray cluster at {address} ({origin}): {error}. Start it with `ray start --head`, or set "
            "RAY_ADDRESS=local for one that ends with this run"
        ) from error


def _start(options: dict[str, Any]) -> Any:
    # By default Ray starts an idle process for every core at once, which slows the start of the real ones.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    return ray.init(address="local", include_dashboard=False, _node_ip_address="127.0.0.1", **options)


def _cluster_address(given: str) -> str | None:
    """The cluster to join; None = start one."""
    if given not in _LOOK:
        return None if given == "local" else given
    # Ray's "auto" also finds what another run started for itself; `ray start` writes down what is for everybody.
    public = read_ray_address()
    return public if public and _answers(public) else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2.0):
            return True
    except (OSError, ValueError):
        return False


def cluster_gone() -> bool:
    """Tells whether the cluster ended under us; its processes went with it, and calls of Ray would wait for it."""
    return _address is not None and not _answers(_address)


def object_store_bytes() -> float:
    """What Ray holds in the object stores of all nodes together, as each told last (a moment ago)."""
    name = "object_store_memory"
    return ray.cluster_resources().get(name, 0.0) - ray.available_resources().get(name, 0.0)


def disconnect() -> None:
    """Leave the cluster; one that :func:`connect` started ends with it."""
    global _address
    _address = None
    if ray.is_initialized():
        ray.shutdown()


@dataclass(frozen=True)
class Device:
    """One device of a placement group: where a process can be started."""

    group: PlacementGroup
    bundle: int
    node: str
    accelerator_ids: tuple[str, ...]


@dataclass(frozen=True)
class Cluster:
    """The placement groups of a run."""

    plan: PlacementPlan
    devices: dict[str, list[Device]]
    """By group name; sorted so that neighbours are on the same node, in the order of their GPU ids."""

    def devices_of(self, role: str, process: int) -> list[Device]:
        group = self.plan.group_of(role)
        return [self.devices[group.name][index] for index in group.devices_of(role, process)]

    def actor_options(self, role: str, process: int) -> dict[str, Any]:
        """Ray options that start one process of a role in its bundle."""
        group = self.plan.group_of(role)
        device = self.devices_of(role, process)[0]
        resources = self.plan.process_resources(group)
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=device.group, placement_group_bundle_index=device.bundle
            ),
        }

    def processes_beside(self, role: str, process: int, roles: Collection[str]) -> int:
        """How many processes of some roles are on the node of one process."""
        node = self.devices_of(role, process)[0].node
        return sum(
            self.devices_of(other.name, index)[0].node == node
            for group in self.plan.groups
            for other in group.roles
            if other.name in roles
            for index in range(other.processes)
        )

    def visible_devices(self, role: str, process: int) -> str | None:
        """CUDA_VISIBLE_DEVICES for one process: all its GPUs; None without GPUs."""
        ids = [gpu for device in self.devices_of(role, process) for gpu in device.accelerator_ids]
        return ",".join(ids) if ids else None

    def remove(self) -> None:
        for devices in self.devices.values():
            if devices:
                remove_placement_group(devices[0].group)


@ray.remote(num_cpus=0, max_retries=0)
def _look_around() -> tuple[str, tuple[str, ...]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), tuple(str(gpu) for gpu in ray.get_gpu_ids())


def create_cluster(plan: PlacementPlan, timeout: float) -> Cluster:
    """Create the placement groups of a plan and wait until they are ready.

    Raises:
        PlacementError: the cluster is too small, or a group was not ready in ``timeout`` seconds.
    """
    check_fits(plan, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    deadline = time.monotonic() + timeout
    # The widest bundles first, as long as the nodes have room in one piece.
    wanted = sorted(plan.groups, key=lambda group: -group.bundle_devices)
    groups = {
        group.name: placement_group([plan.bundle_resources(group)] * group.bundles, strategy="PACK") for group in wanted
    }
    devices: dict[str, list[Device]] = {}
    for asked, (name, group) in zip(wanted, groups.items(), strict=True):
        if not group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            free = ray.available_resources()
            for other in groups.values():
                remove_placement_group(other)
            pieces = f", in pieces of {asked.bundle_devices} of one node each" if asked.bundle_devices > 1 else ""
            raise PlacementError(
                f"the devices of group {name!r}{pieces} were not free within {timeout:g} s (--start_timeout).\n"
                f"Asked for:\n{plan.describe()}\n"
                f"Free in the cluster now: GPU {free.get('GPU', 0.0):g}, CPU {free.get('CPU', 0.0):g}. "
                "Another job may hold them: see `ray status`."
            )
        devices[name] = _sorted_devices(plan, asked, group, deadline)
    return Cluster(plan=plan, devices=devices)


def _sorted_devices(plan: PlacementPlan, asked: Group, group: PlacementGroup, deadline: float) -> list[Device]:
    """Ask every bundle where it is, and put neighbours side by side.

    Raises:
        PlacementError: a node started no process in time.
    """
    probes = [
        _look_around.options(
            num_gpus=asked.bundle_devices if plan.device == "GPU" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(group.bundle_count)
    ]
    try:
        answers = ray.get(probes, timeout=max(1.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise PlacementError(
            f"the devices of group {asked.name!r} are there, but on some of them Ray started no process before the end "
            "of --start_timeout. See raylet.err in /tmp/ray/session_latest/logs of each node, or give it more time"
        ) from error
    return [Device(group, *place) for place in order_devices(answers, asked.bundle_devices)]
