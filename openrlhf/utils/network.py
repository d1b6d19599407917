"""Which address of this host other nodes reach, and which network interface has it."""

from __future__ import annotations

import ipaddress
import os
import socket

from openrlhf.utils.errors import ExplainedError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class NetworkError(ExplainedError, RuntimeError):
    """Other nodes can't reach this one."""


def node_address() -> str:
    """This node's address in its Ray cluster; call it in an actor."""
    import ray

    return str(ray.util.get_node_ip_address())


def family_of(address: str) -> socket.AddressFamily:
    """Of sockets for an address, which is IPv4 or IPv6, or a name (then IPv4)."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_towards(host: str) -> str:
    """The address under which this host sends to another one.

    Raises:
        OSError: the name is unknown, or no route leads there.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Connecting a datagram socket sends nothing; it only asks the routing table for the source address.
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the network interface with an address; None if there is none."""
    import psutil

    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(entry.address.partition("%")[0])
            # A host may have its own name under any address of 127.0.0.0/8, and all belong to one interface.
            if own == wanted or (own.is_loopback and wanted.is_loopback):
                return name
    return None


def let_gloo_listen_towards(host: str, several_nodes: bool = False) -> None:
    """Let gloo listen on the interface that leads to the host where the ranks meet, unless the user chose one.

    By itself it takes the address of the host's own name, which on many machines is 127.0.1.1: then ranks on other
    nodes can't connect.

    Args:
        host: where rank 0 is.
        several_nodes: ranks are known to be on others, so that an address of this host alone won't do.

    Raises:
        NetworkError: this host has no other address.
    """
    if os.environ.get(GLOO_INTERFACE):
        return
    try:
        address = address_towards(host)
    except OSError:
        return  # joining fails, and tells why
    if several_nodes and ipaddress.ip_address(address).is_loopback:
        address = _outward_address(host)
    name = interface_of(address)
    if name is not None:
        os.environ[GLOO_INTERFACE] = name


def _outward_address(host: str) -> str:
    for outside in ("10.255.255.255", "2001:db8::1"):  # nobody's, only for the routing table
        try:
            address = address_towards(outside)
        except OSError:
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise NetworkError(
        f"this host knows {host}, where the ranks of several nodes meet, under an address that only itself can reach, "
        f"and has no route to others; set MASTER_ADDR to its network address, or {GLOO_INTERFACE} to its interface"
    )
