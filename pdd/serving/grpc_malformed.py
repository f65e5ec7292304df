"""Messages that are none, at the gRPC door: the client's mistake, told to it as such. By itself gRPC takes it for a fault of the server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Malformed:
    """What is handed on in the place of a message that cannot be read."""

    why: str


_Behaviour = Callable[[Message, grpc.aio.ServicerContext], Awaitable[Message | None]]


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """INVALID_ARGUMENT for what cannot be parsed, on calls with one request to ``service``."""

    def __init__(self, service: str) -> None:
        self._service = service

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        method = details.method
        if handler is None or handler.request_streaming or method.split("/")[1] != self._service:
            return handler
        parse = handler.request_deserializer
        # Of asyncio's servers they are coroutine functions; the published stubs know those of the others only.
        behaviour = cast("_Behaviour", handler.unary_stream if handler.response_streaming else handler.unary_unary)
        assert parse is not None

        def read(data: bytes) -> Message | _Malformed:
            try:
                return parse(data)
            except DecodeError as error:
                return _Malformed(str(error))

        async def answer(request: Message | _Malformed, context: grpc.aio.ServicerContext) -> Message | None:
            if isinstance(request, _Malformed):
                _log.warning("%s: a message of %s cannot be read: %s", method, context.peer(), request.why)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message cannot be read: it is no valid protobuf of this type")
            return await behaviour(request, context)

        make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        return make(answer, read, handler.response_serializer)
