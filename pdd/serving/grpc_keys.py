"""API keys at the gRPC door: metadata "authorization: Bearer KEY", as in HTTP's header."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NoReturn

import grpc
import grpc.aio

from pdd.serving.accounts import Accounts, UnauthenticatedError
from pdd.serving.admission_check import TENANT

Metadata = Iterable[tuple[str, str | bytes]] | None


class RequireKey(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key, but those of the services ``public``, before anything of them is read."""

    def __init__(self, accounts: Accounts, public: Collection[str] = ()) -> None:
        self._accounts = accounts
        self._public = frozenset(public)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        if details.method.split("/")[1] in self._public:
            return await continuation(details)
        try:
            self._accounts.authenticate(authorization(details.invocation_metadata))
        except UnauthenticatedError as error:
            message = error.message

            async def refuse(_request: object, context: grpc.aio.ServicerContext) -> NoReturn:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

            return grpc.unary_unary_rpc_method_handler(refuse)
        return await continuation(details)


def tenant_of(accounts: Accounts | None, metadata: Metadata) -> str:
    """Of the key that the call came with; where no keys are asked for, everybody's. Raises UnauthenticatedError."""
    return TENANT if accounts is None else accounts.authenticate(authorization(metadata))


def authorization(metadata: Metadata) -> str | None:
    """The one value of it; None where there is none, or more than one."""
    found = [value for key, value in metadata or () if key == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None
