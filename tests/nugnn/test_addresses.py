"""launch-03: the address told to other hosts is never loopback, whatever the resolver says."""

from __future__ import annotations

import pytest

from nugnn.addresses import LOOPBACK, _interfaces, advertised_interface

HERE = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "192.168.7.5"}


def route(target: str) -> str | None:
    """The fabric has 192.168.7.0/24, everything else leaves by eth0."""
    return "192.168.7.5" if target.startswith("192.168.7.") else "10.0.0.5"


def pick(master: str, addresses: list[str], **options: object) -> str:
    settings = {"is_one_host": False, "local_address": route, "interfaces": HERE} | options
    return advertised_interface(master, resolve=lambda name: addresses, **settings)  # type: ignore[arg-type]


def test_launch_03_a_name_that_resolves_to_loopback_is_not_advertised() -> None:
    for loopback in ("127.0.1.1", "127.0.0.1"):
        assert pick("node-a", [loopback]) == "eth0"
        assert pick("node-a", [loopback, "192.168.7.9"]) == "ib0"
    # on the master's host the route to its own address may be loopback
    assert (
        pick("node-a", ["10.0.0.5"], local_address=lambda t: "127.0.0.1" if t == "10.0.0.5" else "10.0.0.5") == "eth0"
    )


def test_launch_03_the_interface_of_the_route_to_the_master_is_taken() -> None:
    assert pick("node-b", ["192.168.7.9"]) == "ib0"
    assert pick("node-b", ["172.16.0.1"]) == "eth0"
    assert pick("node-b", []) == "eth0"  # a name nobody knows here: the default route


def test_launch_03_loopback_only_when_all_processes_are_local() -> None:
    assert pick("node-a", ["10.0.0.5"], is_one_host=True) == LOOPBACK
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=lo is the loopback interface, which other hosts cannot"):
        pick("node-a", ["10.0.0.5"], given="lo")
    assert pick("node-a", ["10.0.0.5"], given="lo", is_one_host=True) == "lo"


def test_launch_03_the_user_is_told_which_variable_to_set() -> None:
    with pytest.raises(ValueError, match=r"no network interface leads from here to node-a; set GLOO_SOCKET_IFNAME to"):
        pick("node-a", ["10.0.0.5"], local_address=lambda target: None)
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=eth9: there is no such network interface.*eth0, ib0, lo"):
        pick("node-a", ["10.0.0.5"], given="eth9")
    assert pick("node-a", ["10.0.0.5"], given="ib0") == "ib0"


def test_interfaces_of_this_machine() -> None:
    assert _interfaces().get(LOOPBACK) == "127.0.0.1"
