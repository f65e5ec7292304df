"""gRPC channels and servers as every process here builds them: message sizes, and keepalive that notices a dead peer within seconds.

Nothing global: a channel shares no connection with another one, a server shares no port.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from pddbridge.tls import RpcTls

# A prompt of ten million token ids fits: a packed int32 takes at most five bytes for ids under 2**31.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES: Final = 16 * 1024
HANDSHAKE_TIMEOUT_MS: Final = 10_000
_CONNECT_MS: Final = 5_000

Options = list[tuple[str, int]]


@dataclass(frozen=True)
class KeepAlive:
    """A ping after ``time_s`` without traffic; without an answer within ``timeout_s`` the connection is dead: its calls end UNAVAILABLE."""

    time_s: float = 2.0
    timeout_s: float = 3.0


@dataclass(frozen=True)
class ServerLimits:
    """``max_connections`` to a server; further ones are closed at once. ``max_streams``: calls that run at once on each; more wait."""

    max_connections: int = 1024
    max_streams: int = 1024


@dataclass(frozen=True)
class ChannelTls:
    """``peer``: the DNS name that the server's certificate must have, whatever its address."""

    tls: RpcTls
    peer: str


def open_channel(
    host: str,
    port: int,
    keep_alive: KeepAlive = KeepAlive(),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    secured: ChannelTls | None = None,
) -> grpc.aio.Channel:
    """A channel of its own connection. Connects lazily and, as long as it is used, reconnects within about a second of its peer being back.
    ``secured`` None: plaintext.
    """
    options: list[tuple[str, int | str]] = [
        *_common(keep_alive, max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long an attempt to connect may take at least; one that is refused is followed by the next after the backoff all the same. It
        # takes two round trips, with TLS four, and on a busy machine its turns at the CPU: 100 ms are too few between continents.
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Peers are named by address in the topology; a proxy from the environment has no place between workers.
        ("grpc.enable_http_proxy", 0),
    ]
    if secured is None:
        return grpc.aio.insecure_channel(address(host, port), options=options)
    credentials = grpc.ssl_channel_credentials(secured.tls.ca, secured.tls.key, secured.tls.cert)
    options.append(("grpc.ssl_target_name_override", secured.peer))
    return grpc.aio.secure_channel(address(host, port), credentials, options=options)


def make_server(
    keep_alive: KeepAlive = KeepAlive(),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    limits: ServerLimits = ServerLimits(),
) -> grpc.aio.Server:
    """A server without ports or services yet. It pings its clients too, so the calls of a vanished client are cancelled within seconds."""
    options = [
        *_common(keep_alive, max_message_bytes),
        # Without this a second process could take the same port and half of the connections.
        ("grpc.so_reuseport", 0),
        # Clients may ping as often as ours do; by default the third ping within five minutes of silence is answered "too_many_pings".
        ("grpc.http2.max_ping_strikes", 0),
        # Whoever connects and says nothing, or begins a TLS handshake and does not go on, is dropped; by default after two minutes.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
    ]
    return grpc.aio.server(options=options, interceptors=interceptors)


def bind(server: grpc.aio.Server, host: str, port: int, tls: RpcTls | None = None) -> int:
    """Listen on ``host`` alone; ``port`` 0 takes a free one. Returns the port. Raises ValueError when it cannot, as for a port in use.
    ``tls`` None: plaintext; with authorities in it, clients without a certificate of theirs are refused.
    """
    try:
        if tls is None:
            bound = server.add_insecure_port(address(host, port))
        else:
            pair = [(tls.key, tls.cert)]
            credentials = grpc.ssl_server_credentials(pair, tls.ca, require_client_auth=tls.ca is not None)
            bound = server.add_secure_port(address(host, port), credentials)
    except RuntimeError as error:
        raise ValueError(f"port: cannot listen on {address(host, port)}: {_why_not(host, port, error)}") from error
    if bound == 0:
        raise ValueError(f"port: cannot listen on {address(host, port)}")
    return bound


def address(host: str, port: int) -> str:
    """``host:port``, IPv6 literals in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _common(keep_alive: KeepAlive, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", round(keep_alive.time_s * 1000)),
        ("grpc.keepalive_timeout_ms", round(keep_alive.timeout_s * 1000)),
        # What gRPC core really waits for a ping's answer; by itself 60 s, whatever the keepalive timeout says (measured with 1.85).
        ("grpc.http2.ping_timeout_ms", round(keep_alive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _why_not(host: str, port: int, error: RuntimeError) -> str:
    """gRPC says only that it failed; the operating system says why."""
    try:
        family, kind, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(resolved)
    except OSError as reason:
        return (reason.strerror or str(reason)).lower()
    return " ".join(str(error).split())
