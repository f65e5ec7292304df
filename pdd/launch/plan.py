"""Decide every port of a launch: config in, topology out. A port the config names is checked to be free, the others are picked."""

from __future__ import annotations

import random
import socket

from pdd.config import LaunchConfig, WorkerConfig
from pdd.topology import Address, Route, Topology, WorkerPlace

# Picked ports are free again until the process that gets them listens. They lie below what kernels give to outgoing connections
# (Linux: from 32768, IANA: from 49152), or a connection made meanwhile could take one.
PICKED_PORTS = range(20000, 32000)
_PICK_ATTEMPTS = 100


def plan_topology(config: LaunchConfig) -> Topology:
    """Raises ValueError naming the field when a configured port is taken."""
    ports = _Ports()
    places = tuple(_place(config, worker, ports) for worker in config.workers)
    http = ports.take(config.serving.host, config.serving.http_port, "serving.http_port")
    grpc = ports.take(config.serving.host, config.serving.grpc_port, "serving.grpc_port")
    registry = ports.take(config.serving.host, config.survival.registry_port, "survival.registry_port")
    ports.release()
    return Topology(places, http, grpc, registry)


def plan_worker(config: LaunchConfig, worker: WorkerConfig) -> WorkerPlace:
    """Ports for one more worker. Raises as :func:`plan_topology`."""
    ports = _Ports()
    place = _place(config, worker, ports)
    ports.release()
    return place


def _place(config: LaunchConfig, worker: WorkerConfig, ports: _Ports) -> WorkerPlace:
    control = ports.take(worker.host, worker.port, f"workers.{worker.name}.port")
    kv = ports.take(worker.host, worker.kv_port, f"workers.{worker.name}.kv_port")
    routes = []
    for site in config.sites:
        link = config.link(site, worker.site)
        if link is not None and link.emulate is not None:
            near = [ports.take("127.0.0.1", None, "link") for _ in range(2)]
            routes.append(Route(site, near[0], near[1]))
        else:
            routes.append(Route(site, control, kv, config.local_link if site == worker.site else "tcp"))
    return WorkerPlace(worker.name, worker.role, worker.site, control, kv, tuple(routes))


class _Ports:
    """Holds every taken port bound until ``release``, so that no two picks collide."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str, port: int | None, field: str) -> Address:
        candidates = [port] if port is not None else random.sample(PICKED_PORTS, _PICK_ATTEMPTS)
        for candidate in candidates:
            try:
                held = socket.create_server((host, candidate))
            except OSError as error:
                refused = error
                continue
            self._held.append(held)
            return Address(host, candidate)
        raise ValueError(f"{field}: cannot listen on {host}:{port or 'any port'}: {refused.strerror}") from refused

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()
