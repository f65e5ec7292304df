"""TLS on the sockets of the TCP link, without a copy of its own: OpenSSL reads into and writes from the caller's memory.

asyncio's socket functions refuse TLS sockets, and its transports copy; so reading and writing wait for the descriptor themselves. One task
may read while another writes. TLS 1.3 renegotiates nothing: reading waits for readability, writing for writability.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from typing import Final

from pddbridge.kv_handshake import HandshakeError
from pddbridge.links.readiness import ready

_LINGER_S: Final = 1.0
_LINGER_READ_BYTES: Final = 1 << 14
# Of alerts and of OpenSSL's own findings: trying again cannot help. Others, as for a record damaged on its way, may be mere bad luck.
_FINAL: Final = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "PROTOCOL_VERSION")


def is_final(error: ssl.SSLError) -> bool:
    """Whether one side refused the other for what it is, as against a connection that broke."""
    return any(word in (error.reason or "") for word in _FINAL)


def broke(error: ssl.SSLError) -> bool:
    """Whether the connection merely ended."""
    return isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def refusal(error: ssl.SSLError, sender: str, receiver: str, we_receive: bool) -> HandshakeError:
    """``error`` as the handshake's, naming both sides. Nothing the other side said is believed, so its name may be an address."""
    reason = str(getattr(error, "verify_message", None) or (error.reason or str(error)).replace("_", " ").lower())
    theirs, ours = f"refused: {reason}", "the authorities of its config"
    if "alert" in reason:
        theirs, ours = "refused", f"refused by the other: {reason}"
    return HandshakeError("certificate", sender, theirs if we_receive else ours, receiver, ours if we_receive else theirs)


async def client_side(sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """``sock``, connected, after the TLS handshake; it is ours from now on, and closed on failure. Raises ssl.SSLError or OSError.

    A server that refuses our certificate says so only at the first read.
    """
    return await _shake_hands(context.wrap_socket(sock, do_handshake_on_connect=False))


async def server_side(sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    """As :func:`client_side` for an accepted ``sock``."""
    return await _shake_hands(context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))


async def receive_some(sock: ssl.SSLSocket, buffer: memoryview) -> int:
    """Bytes read, at least one; 0 at the end of the stream. Raises ssl.SSLError or OSError."""
    while True:
        try:
            return sock.recv_into(buffer)
        except ssl.SSLWantReadError:
            await ready(sock, "in")
        except ssl.SSLWantWriteError:
            await asyncio.sleep(0.001)  # another task may wait for the descriptor to take more; this does not happen in TLS 1.3


async def send_all(sock: ssl.SSLSocket, data: memoryview | bytes) -> None:
    """Raises ssl.SSLError or OSError. When cancelled or failed the socket must be closed."""
    view = memoryview(data)
    while len(view):
        try:
            view = view[sock.send(view) :]
        except ssl.SSLWantWriteError:
            await ready(sock, "out")
        except ssl.SSLWantReadError:
            await asyncio.sleep(0.001)  # as above


async def _shake_hands(sock: ssl.SSLSocket) -> ssl.SSLSocket:
    try:
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await ready(sock, "in")
            except ssl.SSLWantWriteError:
                await ready(sock, "out")
            else:
                return sock
    except ssl.SSLError as error:
        if not broke(error):
            await _linger(sock)
        sock.close()
        raise
    except BaseException:  # cancellation as well: the socket has no owner yet
        sock.close()
        raise


async def _linger(sock: ssl.SSLSocket) -> None:
    """Let the peer read our alert: closing while its bytes are unread would reset the connection and destroy what it has not read yet."""
    with contextlib.suppress(OSError, TimeoutError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_S):
            while True:
                try:
                    if not os.read(sock.fileno(), _LINGER_READ_BYTES):
                        return
                except BlockingIOError:
                    await ready(sock, "in")
