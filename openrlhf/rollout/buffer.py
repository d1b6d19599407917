"""Groups that are rolled out but not yet trained on; part of every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from openrlhf.rollout.group import EpisodeFailure, Group, PromptItem
from openrlhf.rollout.trajectory import Trajectory

# Which groups to take: gets the buffered groups (oldest first) and a number, returns that many indices.
Selection = Callable[[Sequence[Group], int], Sequence[int]]

_STATE_VERSION = 1


def oldest_first(groups: Sequence[Group], count: int) -> list[int]:
    """First in, first out."""
    return list(range(count))


def freshest_first(groups: Sequence[Group], count: int) -> list[int]:
    """The groups sampled by the newest weights, the older entry first among equals."""
    return sorted(range(len(groups)), key=lambda index: (-group_version(groups[index]), index))[:count]


def highest_priority_first(groups: Sequence[Group], count: int) -> list[int]:
    """The groups whose prompts have the largest number under ``priority`` in their metadata (0 without one)."""
    priorities = [float(group.item.metadata.get("priority") or 0.0) for group in groups]
    return sorted(range(len(groups)), key=lambda index: (-priorities[index], index))[:count]


SELECTIONS: dict[str, Selection] = {
    "fifo": oldest_first,
    "freshest": freshest_first,
    "priority": highest_priority_first,
}
"""Selections by the names that ``--buffer_filter_path`` takes."""


def checked_selection(indices: Iterable[Any], size: int, count: int, where: str = "the selection") -> list[int]:
    """The indices as a list.

    Raises:
        ValueError: they are not `count` different indices below `size`.
    """
    chosen = list(indices)
    if len(chosen) != count or len(set(chosen)) != count or not set(chosen) <= set(range(size)):
        raise ValueError(f"{where} gave {chosen}; needed are {count} different indices below {size}")
    return [int(index) for index in chosen]


def group_version(group: Group) -> int:
    """Oldest weight version among the tokens that the policy sampled in this group (-1 without samples)."""
    return min((trajectory.min_version for trajectory in group.trajectories), default=-1)


class RolloutBuffer:
    """A queue of groups. Their prompts were drawn from the data: what is lost here is lost for the epoch."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}  # by id, oldest entry first

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, oldest entry first."""
        return tuple(self._groups.values())

    def put(self, group: Group) -> None:
        """Appends a group.

        Raises:
            ValueError: a group of this id is in the buffer already.
        """
        if group.item.group_id in self._groups:
            raise ValueError(f"group id {group.item.group_id} is in the rollout buffer already")
        self._groups[group.item.group_id] = group

    def take(self, count: int, select: Selection = oldest_first) -> list[Group]:
        """Removes and returns `count` groups, in the order that `select` gives.

        Raises:
            ValueError: fewer are there, or the selection is not `count` different indices of groups.
        """
        if not 0 <= count <= len(self._groups):
            raise ValueError(f"{count} groups asked for, {len(self._groups)} are in the rollout buffer")
        groups = self.groups
        taken = [groups[index] for index in checked_selection(select(groups, count), len(self), count)]
        for group in taken:
            del self._groups[group.item.group_id]
        return taken

    def drop_stale(self, current_version: int, max_staleness: int) -> list[Group]:
        """Removes and returns the groups whose oldest token is more than `max_staleness` versions old.

        The caller counts and reports them: their prompts are used up without having been trained on.
        """
        limit = current_version - max_staleness
        stale = [group for group in self.groups if group_version(group) < limit]
        for group in stale:
            del self._groups[group.item.group_id]
        return stale

    def state_dict(self) -> dict[str, Any]:
        """Returns everything as plain data and NumPy arrays."""
        return {"version": _STATE_VERSION, "groups": [group_to_dict(group) for group in self.groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the contents by those of `state_dict`.

        Raises:
            ValueError: the state has another version or is damaged.
        """
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"rollout buffer state has version {state.get('version')}, this is {_STATE_VERSION}")
        groups = [group_from_dict(entry) for entry in state["groups"]]
        self._groups = {group.item.group_id: group for group in groups}


def group_to_dict(group: Group) -> dict[str, Any]:
    """Returns a group as plain data and NumPy arrays."""
    item = {name: value for name, value in vars(group.item).items() if name != "placed"}
    return {
        "item": {**item, "token_ids": [int(token) for token in group.item.token_ids]},
        "trajectories": [trajectory.to_dict(lists=False) for trajectory in group.trajectories],
        "failures": [asdict(failure) for failure in group.failures],
        "baseline": None if group.baseline is None else group.baseline.to_dict(lists=False),
    }


def group_from_dict(data: Mapping[str, Any]) -> Group:
    """Builds a group from `group_to_dict` output."""
    baseline = data.get("baseline")
    return Group(
        item=PromptItem(**{**data["item"], "images": tuple(data["item"].get("images", ()))}),
        trajectories=tuple(Trajectory.from_dict(entry) for entry in data["trajectories"]),
        failures=tuple(EpisodeFailure(**entry) for entry in data["failures"]),
        baseline=None if baseline is None else Trajectory.from_dict(baseline),
    )
