"""The launcher's door for the operator: ``pdd.v1.Fleet`` on a loopback address, for `pdd workers`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

from pdd.launch.fleet import Fleet, FleetError
from pdd.roles import Role
from pdd.topology import Address
from pddbridge.rpc.gen import registry_pb2, registry_pb2_grpc

_ROLES: tuple[Role, ...] = ("prefill", "relay", "main")
# More at once is a slip of the finger.
MAX_WORKERS_PER_ROLE = 64


class FleetService(registry_pb2_grpc.FleetServicer):
    """Every answer says how the fleet is afterwards. What cannot be done is FAILED_PRECONDITION, with the reason."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def List(self, request: registry_pb2.ListRequest, context: grpc.ServicerContext) -> registry_pb2.ListReply:  # noqa: N802
        return self._after(lambda: None, context)

    def Add(self, request: registry_pb2.AddRequest, context: grpc.ServicerContext) -> registry_pb2.ListReply:  # noqa: N802
        return self._after(lambda: self._fleet.add(_role(request.role), _count(request.count)), context)

    def Drain(self, request: registry_pb2.DrainRequest, context: grpc.ServicerContext) -> registry_pb2.ListReply:  # noqa: N802
        return self._after(lambda: self._fleet.drain(list(request.names)), context)

    def Scale(self, request: registry_pb2.ScaleRequest, context: grpc.ServicerContext) -> registry_pb2.ListReply:  # noqa: N802
        return self._after(lambda: self._fleet.scale(_role(request.role), _count(request.count)), context)

    def _after(self, change: Callable[[], object], context: grpc.ServicerContext) -> registry_pb2.ListReply:
        try:
            change()
            return registry_pb2.ListReply(workers=[registry_pb2.WorkerState(**state) for state in self._fleet.states()])  # type: ignore[arg-type]
        except FleetError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort raises")


def _role(given: str) -> Role:
    for role in _ROLES:
        if role == given:
            return role
    raise FleetError(f"role: given {given!r}, allowed {list(_ROLES)}")


def _count(given: int) -> int:
    if given > MAX_WORKERS_PER_ROLE:
        raise FleetError(f"count: given {given}, allowed 0 to {MAX_WORKERS_PER_ROLE}")
    return given


class FleetServer:
    """``with``: serves at ``at``, the address really bound. Raises ValueError when the port is taken."""

    def __init__(self, fleet: Fleet, host: str, port: int | None) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4, "fleet"), options=[("grpc.so_reuseport", 0)])
        registry_pb2_grpc.add_FleetServicer_to_server(FleetService(fleet), self._server)
        try:
            bound = self._server.add_insecure_port(f"{host}:{port or 0}")
        except RuntimeError as error:
            raise ValueError(f"survival.admin_port: cannot listen on {host}:{port}") from error
        self.at = Address(host, bound)

    def __enter__(self) -> FleetServer:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=1.0).wait()
