"""The gRPC service ``pdd.v1.Registry``, on a port of its own that the operator's config names: workers say here that they are there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from pdd.errors import PddError
from pdd.serving.membership import Membership, Registration
from pdd.topology import Address
from pddbridge.rpc.channel import bind, make_server
from pddbridge.rpc.gen import registry_pb2, registry_pb2_grpc
from pddbridge.rpc.peers import check_joining
from pddbridge.tls import RpcTls

# A registration is a few names.
_MAX_MESSAGE_BYTES = 64 * 1024


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """``proof``: a worker must prove by its certificate who it is."""

    def __init__(self, membership: Membership, lease_s: float, proof: bool) -> None:
        self._membership = membership
        self._lease_s = lease_s
        self._proof = proof

    async def Register(  # noqa: N802
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> registry_pb2.RegisterReply:
        await self._prove(request.name, request.role, context)
        said = Registration(request.name, request.epoch, request.role, request.site, request.control, request.kv, request.fingerprint)
        try:
            draining = await self._membership.register(said)
        except PddError as error:
            await context.abort(grpc.StatusCode[error.code.name], error.message)
        return registry_pb2.RegisterReply(lease_s=self._lease_s, draining=draining)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: grpc.aio.ServicerContext) -> registry_pb2.LeaveReply:  # noqa: N802
        if self._proof:
            role = self._membership.role_of(request.name)
            await self._prove(request.name, role, context)
        self._membership.leave(request.name, request.epoch)
        return registry_pb2.LeaveReply()

    async def _prove(self, name: str, role: str, context: grpc.aio.ServicerContext) -> None:
        why = check_joining(context, name, role) if self._proof else None
        if why is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"worker {name!r}: {why} is needed")


@contextlib.asynccontextmanager
async def registry(membership: Membership, lease_s: float, at: Address, tls: RpcTls | None) -> AsyncIterator[None]:
    """Serve it at ``at`` while the context lasts. Raises ValueError when the port is taken."""
    server = make_server(max_message_bytes=_MAX_MESSAGE_BYTES)
    registry_pb2_grpc.add_RegistryServicer_to_server(RegistryService(membership, lease_s, tls is not None), server)
    bind(server, at.host, at.port, tls)
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace=None)
