"""Middleware of the HTTP door: who may ask what. Puts the tenant of a key where handlers find it; a client cannot."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pdd.serving.accounts import Accounts, UnauthenticatedError
from pdd.serving.admission_check import TENANT
from pdd.serving.openai.errors import error_response

_SCOPE_KEY: Final = "pdd.tenant"


class Authenticate:
    """Every path needs a valid API key but those in ``public``."""

    def __init__(self, app: ASGIApp, accounts: Accounts, public: Collection[str]) -> None:
        self._app = app
        self._accounts = accounts
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public:
            try:
                scope[_SCOPE_KEY] = self._accounts.authenticate(Headers(scope=scope).get("authorization"))
            except UnauthenticatedError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def tenant_of(request: Request) -> str:
    """Of the key that the request came with; where no keys are asked for, everybody's."""
    return str(request.scope.get(_SCOPE_KEY, TENANT))
