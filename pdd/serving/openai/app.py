"""The routes of the OpenAI door, and the handlers that put the pieces in order: read, check, admit, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdd.errors import Code, PddError
from pdd.serving.admission_check import admit, check_model
from pdd.serving.front import Front
from pdd.serving.openai.answer import stream_answer, whole_answer
from pdd.serving.openai.authenticate import Authenticate, tenant_of
from pdd.serving.openai.body import read_body
from pdd.serving.openai.chat import ChatShape
from pdd.serving.openai.completions import CompletionShape
from pdd.serving.openai.decisions import decision_body
from pdd.serving.openai.errors import error_body, error_response, on_http_exception, on_pdd_error, on_unexpected
from pdd.serving.openai.params import Call, chat_call, completion_call
from pdd.serving.openai.schemas import read_chat, read_completion
from pdd.serving.openai.shape import Shape
from pdd.serving.openai.sse import ClientGoneError, EventStream, event, while_connected

BODY_LIMIT_S = 60.0
MAX_ECHOED_CHARACTERS = 256
SHUTTING_DOWN = PddError(Code.UNAVAILABLE, "the service is shutting down")
CLIENT_CLOSED = 499  # nginx's; only ever seen in logs


class OpenAIDoor:
    """HTTP handlers over one Front."""

    def __init__(self, front: Front, registry: CollectorRegistry) -> None:
        self._front = front
        self._registry = registry
        self._started_s = int(time.time())

    async def chat(self, request: Request) -> Response | EventStream:
        return await self._generate(request, lambda body: chat_call(read_chat(body)), ChatShape(self._front.text))

    async def completions(self, request: Request) -> Response | EventStream:
        return await self._generate(request, lambda body: completion_call(read_completion(body)), CompletionShape(self._front.text))

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["id"], self._front)
        return JSONResponse(self._model())

    async def health(self, _request: Request) -> Response:
        """200 only when every worker can be used."""
        unhealthy = list(self._front.unhealthy())
        return JSONResponse({"status": "unhealthy" if unhealthy else "ok", "unhealthy_workers": unhealthy}, 503 if unhealthy else 200)

    async def metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def decisions(self, _request: Request) -> Response:
        """Where overrides are allowed: of the latest requests, what was decided, why, and what came of it. Oldest first."""
        latest = () if self._front.decisions is None else self._front.decisions()
        return JSONResponse({"object": "list", "data": [decision_body(record) for record in latest]})

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": version("pdd-serving")})

    async def _generate(self, request: Request, read: Callable[[bytes], Call], shape: Shape) -> Response | EventStream:
        front = self._front
        try:
            call = read(await read_body(request, front.serving.max_body_bytes, BODY_LIMIT_S))
            requests = await admit(call.wish, front, tenant_of(request))
            if not call.stream:
                return JSONResponse(await while_connected(request.receive, whole_answer(call, requests, front, shape)))
            events = stream_answer(call, requests, front, shape)
            # Headers wait for the first event, so that a refusal or a failure before any token still has its HTTP status.
            first = await while_connected(request.receive, anext(events))
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED)
        except asyncio.CancelledError:
            # Only the server cancels a handler, when it shuts down; its client still gets an answer.
            return error_response(SHUTTING_DOWN)
        farewell = event(error_body(SHUTTING_DOWN))
        return EventStream(first, events, front.stalled_after_s, farewell, lambda: front.stalled("http"))

    def _model(self) -> dict[str, object]:
        limits = self._front.generator.limits
        return {
            "id": limits.model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "pdd",
            "max_model_len": limits.max_context_tokens,
        }


class EchoRequestId:
    """Middleware: a client's X-Request-Id comes back with the answer and is used for nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id") if scope["type"] == "http" else None
        if not given:
            await self._app(scope, receive, send)
            return

        async def echo(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = given[:MAX_ECHOED_CHARACTERS]
            await send(message)

        await self._app(scope, receive, echo)


def create_app(front: Front, registry: CollectorRegistry, public: Collection[str] = ("/health",)) -> Starlette:
    """``registry``: what /metrics shows. ``public``: paths that need no key where the others do."""
    door = OpenAIDoor(front, registry)
    keys = [] if front.accounts is None else [Middleware(Authenticate, accounts=front.accounts, public=public)]
    return Starlette(
        routes=[
            Route("/v1/chat/completions", door.chat, methods=["POST"]),
            Route("/v1/completions", door.completions, methods=["POST"]),
            Route("/v1/models", door.models),
            Route("/v1/models/{id:path}", door.model),
            Route("/health", door.health),
            Route("/metrics", door.metrics),
            Route("/version", door.version),
            # It tells of every tenant's requests.
            *([Route("/debug/decisions", door.decisions)] if front.serving.allow_override and front.accounts is None else []),
        ],
        middleware=[Middleware(EchoRequestId), *keys],
        exception_handlers={PddError: on_pdd_error, HTTPException: on_http_exception, Exception: on_unexpected},
    )
