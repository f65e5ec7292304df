"""Ports of a launch: configured ones are kept or refused by name; picked ones are distinct and out of the way of outgoing connections."""

from __future__ import annotations

import functools
import socket
from collections.abc import Awaitable, Callable

import pytest

from pdd.launch import held_ports
from pdd.launch.held_ports import PICKED_PORTS, HeldPorts
from pdd.launch.plan import plan_topology, plan_worker, release_worker
from pdd.serving.http_server import bind_http
from pdd.topology import Address, Topology
from pddbridge.links import tcp_io
from pddbridge.rpc.channel import bind, make_server
from tests.support.deployments import launch_config


def ports_of(config_changes: dict[str, object] | None = None) -> list[int]:
    config = launch_config("m")
    serving = config.serving.model_copy(update=config_changes or {})
    topology = plan_topology(config.model_copy(update={"serving": serving}))
    return [address.port for address in addresses_of(topology)]


def addresses_of(topology: Topology) -> set[Address]:
    addresses = {topology.http, topology.grpc}
    for place in topology.workers:
        addresses |= {place.control, place.kv} | {a for route in place.routes for a in (route.control, route.kv)}
    return addresses


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


def test_a_port_given_twice_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with pytest.raises(ValueError, match=rf"serving.grpc_port: cannot listen on 127.0.0.1:{free}: port {free} is given twice"):
        ports_of({"http_port": free, "grpc_port": free})


def test_what_was_picked_stays_ours_until_it_is_let_go_of(monkeypatch: pytest.MonkeyPatch):
    """Processes take seconds to come up, and one that died is started again on its port: meanwhile another launch picked it."""
    config = launch_config("m")
    with HeldPorts() as ports:
        topology = plan_topology(config, ports)
        ours = sorted(address.port for address in addresses_of(topology) | {topology.registry})
        for port in ours:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        monkeypatch.setattr(held_ports, "PICKED_PORTS", ours)
        with pytest.raises(ValueError, match=r"cannot listen on .*:any port"):
            plan_topology(config)
        release_worker(topology.worker("main-0"), ports)
        with HeldPorts() as others:
            place = plan_worker(config, config.workers[2], others)
        assert addresses_of(Topology((place,), topology.http, topology.grpc)) < addresses_of(topology)
    again = plan_topology(config)
    assert sorted(address.port for address in addresses_of(again) | {again.registry}) == ours


def test_a_port_that_somebody_listens_on_is_not_picked(monkeypatch: pytest.MonkeyPatch):
    with HeldPorts() as ports, socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as probe:
        candidates = [server.getsockname()[1] for server in (taken, probe)]
        probe.close()
        monkeypatch.setattr(held_ports, "PICKED_PORTS", candidates)
        assert ports.take("127.0.0.1", None, "some.port").port == candidates[1]


async def listen(kind: str, at: Address) -> Callable[[], Awaitable[None]]:
    """As the processes of a deployment do. Returns how to end it."""
    if kind == "grpc":
        server = make_server()
        bind(server, at.host, at.port)
        await server.start()
        return functools.partial(server.stop, None)
    listener = bind_http(at.host, at.port) if kind == "http" else await tcp_io.listen(at.host, at.port)
    listener.listen()

    async def end() -> None:
        listener.close()

    return end


@pytest.mark.parametrize("kind", ["http", "grpc", "kv"])
async def test_a_process_listens_on_a_held_port_and_again_after_it_has_died(kind: str):
    with HeldPorts() as ports:
        at = ports.take("127.0.0.1", None, kind)
        for _ in range(2):
            end = await listen(kind, at)
            socket.create_connection((at.host, at.port), timeout=5).close()
            with pytest.raises(OSError, match="in use"):
                socket.create_server((at.host, at.port))
            await end()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((at.host, at.port), timeout=5)
