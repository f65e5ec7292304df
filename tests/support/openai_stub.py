"""A small OpenAI-compatible endpoint on a real socket whose answers and delays a test decides."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_POLL_S = 0.01


@dataclass
class OpenAIStub:
    """Answers ``max_tokens`` tokens, numbered from 1000 on, ``gap_s`` apart. ``fails``: what it does with the n-th request instead:
    "refuse" (status 429) or "break" (ends without a finish reason). ``bodies``: as they came;
    ``authorizations``: of every request.
    """

    tells_ids: bool = True
    gap_s: float = 0.002
    fails: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, object]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    _running: int = 0

    def __enter__(self) -> OpenAIStub:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", ws="none"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline_s, "the stub did not start"
            time.sleep(_POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _models(self, request: Request) -> Response:
        self.authorizations.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "stub", "owned_by": "pdd" if self.tells_ids else "others"}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        if self.fails.get(number) == "refuse":
            return JSONResponse({"error": {"message": "too many requests"}}, status_code=429)
        return StreamingResponse(self._stream(body, self.fails.get(number) == "break"), media_type="text/event-stream")

    async def _stream(self, body: dict[str, object], breaks: bool) -> AsyncIterator[str]:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        count = int(str(body["max_tokens"]))
        try:
            for index in range(count):
                await asyncio.sleep(self.gap_s)
                choice: dict[str, object] = {"text": "x", "delta": {"content": "x"}, "finish_reason": None}
                if self.tells_ids:
                    choice["pdd"] = {"origin": "main", "token_ids": [1000 + index]}
                if index + 1 == count and not breaks:
                    choice["finish_reason"] = "length"
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            prompt = body.get("prompt")
            usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 1, "completion_tokens": count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        finally:
            self._running -= 1
