"""Which process is at the other end of a gRPC call, by its certificate, and a guard that lets only those in who may come."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Protocol

import grpc
import grpc.aio

from pddbridge.tls import identity, why_not

log = logging.getLogger(__name__)

_SAN = "x509_subject_alternative_name"


class Call(Protocol):
    """What is needed of a ServicerContext."""

    def auth_context(self) -> object: ...
    def peer(self) -> str: ...
    async def abort(self, code: grpc.StatusCode, details: str = "") -> object: ...


# Allowed only to a peer that proved one of these identities; asked at every call, so that who joins later is let in.
Allowed = Callable[[], Collection[str]]


def proven_names(call: Call) -> frozenset[str]:
    """The names in the caller's checked certificate; none over plaintext."""
    found = call.auth_context()
    assert isinstance(found, dict | type(None))
    return frozenset(bytes(name).decode("utf-8", "replace") for name in (found or {}).get(_SAN, ()))


def check_joining(call: Call, name: str, role: str) -> str | None:
    """Why the caller is not believed to be worker ``name`` with ``role``; None if its certificate says so. For run-time registration,
    where no topology knows the name yet: that the authority signed it is what admits it."""
    return why_not(name, identity(name, role), proven_names(call))


class PeerGuard(grpc.aio.ServerInterceptor):
    """Refuses every call, with PERMISSION_DENIED naming both sides, whose caller proved none of the identities ``allowed()``."""

    def __init__(self, mine: str, allowed: Allowed) -> None:
        self.num_refused = 0
        self._mine = mine
        self._allowed = allowed

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None:  # no such method: gRPC answers that itself
            return handler
        kinds = {"unary_unary": (False, False), "unary_stream": (False, True), "stream_unary": (True, False), "stream_stream": (True, True)}
        kind = next(
            kind for kind, (asks, answers) in kinds.items() if (handler.request_streaming, handler.response_streaming) == (asks, answers)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded = self._guarded(getattr(handler, kind))
        made = make(guarded, handler.request_deserializer, handler.response_serializer)
        assert isinstance(made, grpc.RpcMethodHandler)
        return made

    def _guarded(self, behaviour: Callable[[object, Call], object]) -> Callable[[object, Call], object]:
        if inspect.isasyncgenfunction(behaviour):

            async def generate(request: object, call: Call) -> AsyncIterator[object]:
                await self._check(call)
                async for response in behaviour(request, call):
                    yield response

            return generate

        async def answer(request: object, call: Call) -> object:
            await self._check(call)
            answered = behaviour(request, call)
            assert inspect.isawaitable(answered)
            return await answered

        return answer

    async def _check(self, call: Call) -> None:
        proven, allowed = proven_names(call), self._allowed()
        if not proven.isdisjoint(allowed):
            return
        self.num_refused += 1
        told = f"{self._mine} takes calls of {sorted(allowed)}, the caller's certificate is for {sorted(proven)}"
        log.error("refused a call from %s: %s", call.peer(), told)
        await call.abort(grpc.StatusCode.PERMISSION_DENIED, told)
