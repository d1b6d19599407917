"""Registries: algorithms are found by the name that the command line uses."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for. ``kind`` and ``flag`` are used in error messages."""

    def __init__(self, kind: str, flag: str) -> None:
        self.kind = kind
        self.flag = flag
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        """Register ``entry``; a name can be taken only once."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is already registered")
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        """The entry called ``name``.

        Raises:
            ValueError: unknown name; the message lists the known ones.
        """
        if name not in self._entries:
            raise ValueError(f"unknown {self.kind} {name!r} ({self.flag}); known: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """Registered names in order of registration."""
        return tuple(self._entries)
