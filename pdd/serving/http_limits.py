"""Limits of the HTTP door's connections: how many there are, how long a client may take to say what it wants, and in how many bytes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdd.errors import Code, PddError
from pdd.serving.openai.errors import HeadTooLargeError, error_response

# Of the request line and the headers together.
MAX_HEADER_BYTES: Final = 64 * 1024


@dataclass
class ConnectionCounts:
    """Ever. ``refused``: closed at once because there were too many; ``slow``: closed because headers did not come."""

    refused: int = 0
    slow: int = 0


@dataclass(frozen=True)
class HttpLimits:
    """``max_connections`` at once; ``header_timeout_s`` from a connection's or a request's first byte to the end of its headers."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    counts: ConnectionCounts = field(default_factory=ConnectionCounts)


class LimitedConfig(uvicorn.Config):
    """uvicorn's, with limits for :class:`LimitedProtocol`."""

    limits: HttpLimits = HttpLimits()


class LimitedHead:
    """h11 limits a head only while some of it is missing: one that came at once is measured here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > MAX_HEADER_BYTES:
            await error_response(HeadTooLargeError(MAX_HEADER_BYTES))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    """Of request line and headers, each with its separators, but for padding."""
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"]) + len("  HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


class LimitedProtocol(H11Protocol):
    """uvicorn waits for headers as long as a client likes, takes any number of connections, and closes on a client that still sends."""

    _late: asyncio.TimerHandle | None = None
    _refused = False

    @property
    def _limits(self) -> HttpLimits:
        assert isinstance(self.config, LimitedConfig)
        return self.config.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._limits.counts.refused += 1
            transport.abort()
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._answering():
            self._await_headers()
        super().data_received(data)
        if self._answering():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._answering():  # a request that was sent ahead
            self._stop_waiting()
        elif self.conn.trailing_data[0]:  # the beginning of one
            self._await_headers()

    def send_400_response(self, msg: str) -> None:
        """h11 could not read a request. What else its client sends is taken for ``header_timeout_s`` and dropped: a connection that is
        closed with something unread is reset, and the answer is lost.
        """
        if self._answering():  # a broken body, of which the handler must hear
            super().send_400_response(msg)
            return
        error = sys.exception()
        too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        why = HeadTooLargeError(MAX_HEADER_BYTES) if too_large else PddError(Code.INVALID_ARGUMENT, f"this is no HTTP request: {error}")
        answer = error_response(why)
        head = h11.Response(
            status_code=answer.status_code,
            headers=[*answer.raw_headers, (b"connection", b"close")],
            reason=HTTPStatus(answer.status_code).phrase.encode(),
        )
        self.transport.write(
            b"".join(self.conn.send(part) or b"" for part in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()))
        )
        self._refused = True
        self._stop_waiting()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._late = self.loop.call_later(self._limits.header_timeout_s, self.transport.close)

    def _answering(self) -> bool:
        """Whether a request's headers are here and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._limits.header_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if not self._answering() and not self.transport.is_closing():
            self._limits.counts.slow += 1
            self.transport.abort()
