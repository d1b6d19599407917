"""Ports for processes that are started in a moment."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20000
"""Ray's workers have those below."""


def unused_port() -> int:
    """A port of 127.0.0.1 that is free, and that the kernel gives to nobody who asks for any.

    One that was asked for in that way may be somebody else's before it is used: the tests beside this one start Ray,
    which takes a hundred of them.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    everywhere = range(LOWEST, 65536)
    ports = [port for port in everywhere if not low <= port <= high] or everywhere
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as listener:
            # As servers do: connections that ended a moment ago are no hindrance.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("none of a hundred ports is free")
