"""Decide every port of a launch: config in, topology out. A port the config names is checked to be free, the others are picked."""

from __future__ import annotations

from pdd.config import LaunchConfig, WorkerConfig
from pdd.launch.held_ports import HeldPorts
from pdd.topology import Address, Route, Topology, WorkerPlace


def plan_topology(config: LaunchConfig, ports: HeldPorts | None = None) -> Topology:
    """``ports``: hold them until their processes have ended; None: for who starts nothing, they are let go of at once. Raises ValueError
    naming the field when a configured port is taken.
    """
    if ports is None:
        with HeldPorts() as briefly:
            return plan_topology(config, briefly)
    places = tuple(_place(config, worker, ports) for worker in config.workers)
    http, grpc = plan_doors(config, ports)
    registry = ports.take(config.serving.host, config.survival.registry_port, "survival.registry_port")
    return Topology(places, http, grpc, registry)


def plan_doors(config: LaunchConfig, ports: HeldPorts) -> tuple[Address, Address]:
    """HTTP and gRPC, for a coordinator over workers that there are. Raises as :func:`plan_topology`."""
    http = ports.take(config.serving.host, config.serving.http_port, "serving.http_port")
    return http, ports.take(config.serving.host, config.serving.grpc_port, "serving.grpc_port")


def plan_worker(config: LaunchConfig, worker: WorkerConfig, ports: HeldPorts) -> WorkerPlace:
    """Ports for one more worker. Raises as :func:`plan_topology`."""
    return _place(config, worker, ports)


def release_worker(place: WorkerPlace, ports: HeldPorts) -> None:
    """It is no longer part of the deployment."""
    ports.release({place.control, place.kv, *(address for route in place.routes for address in (route.control, route.kv))})


def _place(config: LaunchConfig, worker: WorkerConfig, ports: HeldPorts) -> WorkerPlace:
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
