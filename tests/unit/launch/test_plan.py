"""Ports of a launch: configured ones are kept or refused by name; picked ones are distinct and out of the way of outgoing connections."""

from __future__ import annotations

import socket

import pytest

from pdd.launch.plan import PICKED_PORTS, plan_topology
from tests.support.deployments import launch_config


def ports_of(config_changes: dict[str, object] | None = None) -> list[int]:
    config = launch_config("m")
    serving = config.serving.model_copy(update=config_changes or {})
    topology = plan_topology(config.model_copy(update={"serving": serving}))
    addresses = {topology.http, topology.grpc}
    for place in topology.workers:
        addresses |= {place.control, place.kv} | {a for route in place.routes for a in (route.control, route.kv)}
    return [address.port for address in addresses]


def test_picked_ports_are_distinct_and_below_the_ephemeral_range():
    """An outgoing connection took a port between its being picked and its being listened on: seen once in a test run."""
    ports = ports_of()
    # Three workers with two ports each, two doors, and the link's near ends: main's two from a, prefill's and relay's four from b.
    assert len(set(ports)) == len(ports) == 14
    assert all(port in PICKED_PORTS for port in ports)
    assert PICKED_PORTS.stop <= 32768


def test_a_configured_port_is_kept():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    assert free in ports_of({"http_port": free})


def test_a_configured_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"serving.grpc_port: cannot listen on 127.0.0.1:{port}"):
            ports_of({"grpc_port": port})
