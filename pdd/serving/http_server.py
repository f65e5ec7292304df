"""uvicorn on a socket of ours: the port is known to be ours before anything else starts, and signals stay with the composition root."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from pdd.serving.http_limits import MAX_HEADER_BYTES, HttpLimits, LimitedConfig, LimitedHead, LimitedProtocol

GRACE_S = 3  # running streams get this long at shutdown, then they are cancelled


class HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """uvicorn would install its own handlers for SIGINT and SIGTERM here."""
        yield


def bind_http(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket; ``port`` 0 takes a free one. Raises ValueError naming address and reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ValueError(f"serving.http_port: cannot listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def make_http_server(
    app: ASGIApp, grace_s: int = GRACE_S, limits: HttpLimits | None = None, cert: tuple[str, str] | None = None
) -> HttpServer:
    """Serve with ``await server.serve(sockets=[bound])``; ``server.should_exit = True`` ends it, ``grace_s`` later at the latest. ``cert``:
    PEM files of certificate and key, for TLS. Raises ValueError when they cannot be used.
    """
    config = LimitedConfig(
        LimitedHead(app),
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=None if cert is None else cert[0],
        ssl_keyfile=None if cert is None else cert[1],
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=75,
    )
    config.limits = limits or HttpLimits()
    try:
        config.load()
    except OSError as error:
        raise ValueError(f"security.door_cert, security.door_key: {cert} cannot be used: {error.strerror or error}") from error
    return HttpServer(config)
