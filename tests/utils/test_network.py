"""From a host to the interface that leads there; interfaces of invented machines."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from openrlhf.utils import network
from openrlhf.utils.network import GLOO_INTERFACE, NetworkError, interface_of, let_gloo_listen_towards


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interfaces; routes to the host "other" by the fast one and by default by the slow one."""

    def entry(address: str, family: int) -> SimpleNamespace:
        return SimpleNamespace(address=address, family=family)

    interfaces = {
        "slow0": [entry("02:fc:00:00:00:01", socket.AF_PACKET), entry("10.0.0.5", socket.AF_INET)],
        "lo": [entry("127.0.0.1", socket.AF_INET), entry("::1", socket.AF_INET6)],
        "fast0": [entry("192.168.7.5", socket.AF_INET), entry("fe80::5%fast0", socket.AF_INET6)],
    }
    routes = {"other": "192.168.7.5", "me": "127.0.0.1", "10.255.255.255": "10.0.0.5"}

    def address_towards(host: str) -> str:
        if host not in routes:
            raise OSError("no route")
        return routes[host]

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(network, "address_towards", address_towards)
    monkeypatch.setenv(GLOO_INTERFACE, "")


def test_interfaces_are_found_by_their_addresses() -> None:
    names = [interface_of(a) for a in ("10.0.0.5", "192.168.7.5", "127.0.1.1", "::1", "fe80::5%fast0", "10.0.0.6")]
    assert names == ["slow0", "fast0", "lo", "lo", "fast0", None]


@pytest.mark.parametrize(
    ("host", "several_nodes", "interface"),
    [
        ("other", True, "fast0"),
        ("other", False, "fast0"),
        ("me", False, "lo"),
        ("me", True, "slow0"),  # what the host calls itself leads nobody else here
        ("unknown", True, ""),
    ],
)
def test_gloo_gets_the_interface_that_leads_to_the_meeting(host: str, several_nodes: bool, interface: str) -> None:
    let_gloo_listen_towards(host, several_nodes)
    assert os.environ[GLOO_INTERFACE] == interface


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "slow0")
    let_gloo_listen_towards("other")
    assert os.environ[GLOO_INTERFACE] == "slow0"


def test_a_host_that_others_cannot_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "address_towards", lambda host: "127.0.0.1")
    with pytest.raises(NetworkError, match="knows me, .* only itself can reach.* set MASTER_ADDR"):
        let_gloo_listen_towards("me", several_nodes=True)
