"""Limits of the HTTP door's connections: how many there are, and how long a client may take to say what it wants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

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


class LimitedProtocol(H11Protocol):
    """uvicorn waits for headers as long as a client likes, and takes any number of connections."""

    _late: asyncio.TimerHandle | None = None

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
