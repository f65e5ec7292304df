"""gRPC under mutual TLS: who may call whom, every kind of method, and a joining worker's name and role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import grpc.aio
import pytest

from pddbridge.rpc.channel import ChannelTls, bind, make_server, open_channel
from pddbridge.rpc.peers import PeerGuard, check_joining
from pddbridge.tls import RpcTls, identity
from tests.support.certs import rpc_tls

WORKER = identity("main-1", "main")
COORDINATOR = identity("coordinator", "coordinator")


class Everything(grpc.GenericRpcHandler):
    """A method of every kind, in both ways to write one. Each answers what it was sent."""

    def __init__(self) -> None:
        self.num_served = 0
        self.joining: list[str | None] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        kind = details.method.rsplit("/", 1)[1]
        methods = {
            "unary_unary": grpc.unary_unary_rpc_method_handler(self.one),
            "unary_stream": grpc.unary_stream_rpc_method_handler(self.generated),
            "stream_unary": grpc.stream_unary_rpc_method_handler(self.last),
            "stream_stream": grpc.stream_stream_rpc_method_handler(self.written),
        }
        return methods.get(kind)

    async def one(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.num_served += 1
        self.joining += [check_joining(context, "main-1", "main"), check_joining(context, "coordinator", "coordinator")]
        return request

    async def generated(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self.num_served += 1
        yield request

    async def last(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        self.num_served += 1
        return [request async for request in requests][-1]

    async def written(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self.num_served += 1
        async for request in requests:
            await context.write(request)


KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@contextlib.asynccontextmanager
async def serving() -> AsyncGenerator[tuple[Everything, PeerGuard, int]]:
    methods, guard = Everything(), PeerGuard(WORKER, lambda: (COORDINATOR,))
    server = make_server(interceptors=[guard])
    server.add_generic_rpc_handlers((methods,))
    port = bind(server, "127.0.0.1", 0, rpc_tls("main-1", "main"))
    await server.start()
    try:
        yield methods, guard, port
    finally:
        await server.stop(0)


async def call(port: int, kind: str, tls: RpcTls | None, peer: str = WORKER) -> bytes:
    async with open_channel("127.0.0.1", port, secured=None if tls is None else ChannelTls(tls, peer)) as channel:
        method = getattr(channel, kind)(f"/any/{kind}")
        sent = iter([b"x"]) if kind.startswith("stream") else b"x"
        answer = method(sent, timeout=5)
        if kind.endswith("unary"):
            return await answer
        return b"".join([part async for part in answer])


async def test_every_kind_of_call_passes_with_the_right_certificate() -> None:
    async with serving() as (methods, guard, port):
        for kind in KINDS:
            assert await call(port, kind, rpc_tls("coordinator", "coordinator")) == b"x"
        assert (methods.num_served, guard.num_refused) == (4, 0)
        assert methods.joining[1] is None
        assert methods.joining[0] == f"a certificate for {WORKER}"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await call(port, "unary_unary", rpc_tls("coordinator", "coordinator"), peer=identity("main-2", "main"))
        assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE  # it is not whom we meant to reach


async def test_every_kind_is_refused_to_others_naming_both_sides() -> None:
    async with serving() as (methods, guard, port):
        for kind in KINDS:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(port, kind, rpc_tls("relay-1", "relay"))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert WORKER in str(refused.value.details())
            assert identity("relay-1", "relay") in str(refused.value.details())
        assert (methods.num_served, guard.num_refused) == (0, 4)


@pytest.mark.parametrize(
    "tls",
    [rpc_tls("coordinator", "coordinator", signed_by="another"), RpcTls(b"", b"", b""), None],
    ids=["another authority", "no certificate", "no TLS"],
)
async def test_without_a_certificate_of_ours_nothing_is_served(tls: RpcTls | None) -> None:
    async with serving() as (methods, _, port):
        if tls is not None and not tls.cert:
            credentials = grpc.ssl_channel_credentials(rpc_tls("coordinator", "coordinator").ca)
            options = [("grpc.ssl_target_name_override", WORKER)]
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/any/unary_unary")(b"x", timeout=2)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(port, "unary_unary", tls)
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert methods.num_served == 0
