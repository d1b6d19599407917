"""Which processes share which devices: a pure function from the configuration. Knows nothing of Ray.

A *device* is a GPU or, on a machine without GPUs, a quarter of a CPU core (``CPU_SHARE``), so that the same flags
describe a laptop and a cluster. A *group* becomes one Ray placement group with one bundle a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openrlhf.config import PPOConfig
from openrlhf.config.derive import gpus_per_role, sharing_roles
from openrlhf.utils.errors import ExplainedError

CPU_SHARE = 0.25
"""CPU cores that count as one device where there are no GPUs."""


class PlacementError(ExplainedError, ValueError):
    """The asked-for placement can't exist; the message says what was asked for and what there is."""


@dataclass(frozen=True)
class Role:
    """A model (or the engines) and the number of processes it needs."""

    name: str
    processes: int
    devices_per_process: int = 1

    @property
    def devices(self) -> int:
        return self.processes * self.devices_per_process


@dataclass(frozen=True)
class Group:
    """Roles that share devices: each of the ``devices`` holds one process of every role."""

    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        return "+".join(role.name for role in self.roles)

    @property
    def devices(self) -> int:
        return max(role.devices for role in self.roles)

    @property
    def bundle_devices(self) -> int:
        """Devices of one bundle: those of the widest process, which has to find them on one node."""
        return max(role.devices_per_process for role in self.roles)

    @property
    def bundles(self) -> int:
        return self.devices // self.bundle_devices

    @property
    def share(self) -> float:
        """The part of a device that one process books with Ray; rounded down so that all fit."""
        return math.floor(100 / len(self.roles)) / 100

    def devices_of(self, role_name: str, process: int) -> range:
        """Which of the group's devices one process of a role has."""
        role = next(role for role in self.roles if role.name == role_name)
        return range(process * role.devices_per_process, (process + 1) * role.devices_per_process)


@dataclass(frozen=True)
class PlacementPlan:
    """All groups of a run."""

    groups: tuple[Group, ...]
    device: str
    """The Ray resource that is a device: "GPU" or "CPU"."""

    def group_of(self, role_name: str) -> Group:
        for group in self.groups:
            if any(role.name == role_name for role in group.roles):
                return group
        raise KeyError(f"no role {role_name!r} in this plan; roles: {', '.join(self.role_names)}")

    @property
    def role_names(self) -> list[str]:
        return [role.name for group in self.groups for role in group.roles]

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    def device_resources(self) -> dict[str, float]:
        """What one device books with Ray."""
        return {"GPU": 1.0, "CPU": 1.0} if self.device == "GPU" else {"CPU": CPU_SHARE}

    def bundle_resources(self, group: Group) -> dict[str, float]:
        """What one bundle of a group books with Ray."""
        return {key: value * group.bundle_devices for key, value in self.device_resources().items()}

    def process_resources(self, group: Group) -> dict[str, float]:
        """What one process of a group books inside its bundle."""
        return {key: value * group.share for key, value in self.device_resources().items()}

    @property
    def title(self) -> str:
        """The number of devices, and that they are CPUs, where someone may have counted on GPUs."""
        return f"{self.devices} devices" + ("" if self.device == "GPU" else "; Ray has found no GPU, all run on CPUs")

    def describe(self) -> str:
        """One line a group: who shares how many devices."""
        unit = "GPU" if self.device == "GPU" else f"CPU share ({CPU_SHARE:g} core)"
        lines = []
        for group in self.groups:
            members = ", ".join(
                f"{role.name} {role.processes}"
                + (f"x{role.devices_per_process}" if role.devices_per_process > 1 else "")
                for role in group.roles
            )
            lines.append(f"  {group.devices} x {unit}: {members}")
        return "\n".join(lines)


def roles_of(cfg: PPOConfig) -> dict[str, Role]:
    """The roles that a configuration needs, by name; see :func:`gpus_per_role`."""
    roles = {name: Role(name, gpus) for name, gpus in gpus_per_role(cfg)[0].items()}
    if "engine" in roles:
        roles["engine"] = Role("engine", cfg.vllm_num_engines, cfg.vllm_tensor_parallel_size)
    return roles


def plan_placement(cfg: PPOConfig, device: str) -> PlacementPlan:
    """Decide which roles share devices.

    Args:
        cfg: a validated configuration.
        device: "GPU" or "CPU", the resource that counts as a device.
    """
    roles = roles_of(cfg)
    groups: list[Group] = []
    placed: set[str] = set()
    for names in sharing_roles(cfg).values():
        members = tuple(roles[name] for name in names if name in roles)
        if members:
            groups.append(Group(members))
            placed.update(role.name for role in members)
    groups.extend(Group((role,)) for name, role in roles.items() if name not in placed)
    return PlacementPlan(groups=tuple(groups), device=device)


def order_devices(
    found: Sequence[tuple[str, Sequence[str]]], bundle_devices: int
) -> list[tuple[int, str, tuple[str, ...]]]:
    """The devices of a group in the order in which its processes take them.

    Neighbours are on the same node, in the order of their GPU ids, and those of one bundle side by side: the first
    ``n`` devices of a bundle belong to one process of ``n`` devices, or to ``n`` neighbouring ranks.

    Args:
        found: of each bundle its node and its GPU ids (none on a CPU).
        bundle_devices: devices of each.

    Returns:
        Of each device its bundle, its node and its GPU id (a tuple of one, or none).
    """

    def sort_key(bundle: int) -> tuple[str, list[int], int]:
        node, ids = found[bundle]
        return node, sorted(int(gpu) for gpu in ids if gpu.isdigit()), bundle

    devices = []
    for bundle in sorted(range(len(found)), key=sort_key):
        node, ids = found[bundle]
        ordered = sorted(ids, key=lambda gpu: (int(gpu) if gpu.isdigit() else -1, gpu))
        devices += [(bundle, node, tuple(ordered[i : i + 1])) for i in range(bundle_devices)]
    return devices


def check_fits(plan: PlacementPlan, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a plan that the cluster can never hold.

    Args:
        plan: what is asked for.
        nodes: the total resources of every living node, as Ray counts them.

    Raises:
        PlacementError: naming what was asked for and what each node has.
    """
    device = plan.device_resources()
    capacity = [min(math.floor(node.get(key, 0.0) / value + 1e-9) for key, value in device.items()) for node in nodes]
    problems = []
    if sum(capacity) < plan.devices:
        problems.append(f"it needs {plan.devices} devices in all and the cluster has {sum(capacity)}")
    largest = max(capacity, default=0)
    for role in (role for group in plan.groups for role in group.roles):
        size = role.devices_per_process
        room = sum(count // size for count in capacity)
        if size > largest:
            problems.append(
                f"one {role.name} process needs {size} devices of one node and the largest node has {largest}"
            )
        elif size > 1 and room < role.processes:
            problems.append(
                f"each of {role.processes} {role.name} processes needs {size} devices of one node, and the nodes have "
                f"room for {room}"
            )
    if problems:
        have = "\n".join(
            f"  node {index}: "
            + ", ".join(f"{key} {node.get(key, 0.0):g}" for key in ("GPU", "CPU"))
            + f" = {count} devices"
            for index, (node, count) in enumerate(zip(nodes, capacity, strict=True))
        )
        raise PlacementError(
            "this placement does not fit: "
            + "; ".join(problems)
            + f".\nAsked for:\n{plan.describe()}\nThe cluster has:\n{have or '  no nodes'}\n"
            "Ask for fewer devices (--actor_num_gpus_per_node and its kin, --vllm_num_engines), share them "
            "(--colocate_all_models, --colocate_actor_ref), choose a --vllm_tensor_parallel_size that divides the GPUs "
            "of a node, or add nodes. RAY_ADDRESS names the cluster that a run uses; one that it starts for itself has "
            "this machine only."
        )
