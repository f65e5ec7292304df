"""Server-sent events, and doing work only as long as the client is there to read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks nginx not to collect the stream
]


class ClientGoneError(Exception):
    """The client closed the connection."""


def event(payload: dict[str, object]) -> bytes:
    """One event. ASCII only: some clients split lines at U+2028 and its like, which JSON leaves as they are."""
    return b"data: " + json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """What ``work`` returns or raises. Raises ClientGoneError as soon as the client closes the connection, after ``work`` is cancelled and
    has cleaned up. The body must have been read."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream:
    """An ASGI response: ``first``, then what ``rest`` yields. ``rest`` is closed when the client leaves, at once and not at its next
    event, and when the client takes longer than ``stall_s`` to read one event, of which ``stalled`` is told. At a shutdown ``farewell`` is
    the last event. Meanwhile events wait in ``rest``, whose source is bounded by the request's tokens and held up by nobody."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], stall_s: float, farewell: bytes, stalled: Callable[[], None]
    ) -> None:
        self._first = first
        self._rest = rest
        self._stall_s = stall_s
        self._farewell = farewell
        self._stalled = stalled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                await while_connected(receive, self._send_all(send))
            except ClientGoneError:
                return
            except TimeoutError:
                # The server closes a connection whose answer is left unfinished; a client that reads on sees that it is.
                self._stalled()
                return
            except asyncio.CancelledError:
                # uvicorn cancels what still runs after its grace; the client must not take that for the end of the answer.
                await self._send_event(send, self._farewell)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                raise

    async def _send_all(self, send: Send) -> None:
        await self._send_event(send, self._first)
        async for data in self._rest:
            await self._send_event(send, data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
