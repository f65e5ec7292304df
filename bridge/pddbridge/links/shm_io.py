"""The control socket of the shared-memory link: a Unix socket in the abstract namespace, named by the receiver's epoch.

No file, so nothing is left behind; reachable only on the same host (and in the same network namespace). Whoever is at the other end must
be the same user. A sender's hello carries the arena's descriptor.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncGenerator
from typing import Final

from pddbridge.kv_handshake import HANDSHAKE_HEADER_BYTES, decode_body, decode_message_header
from pddbridge.kv_wire import WireError, WireFault
from pddbridge.links import tcp_io
from pddbridge.links.intake import ConnectionClosedError

_BACKLOG: Final = 64
_READ_AHEAD: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # Linux's struct ucred: pid, uid, gid


def supported() -> bool:
    """Whether this platform has what the link needs: anonymous files, abstract Unix sockets, peer credentials. Linux has."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")


def address(epoch: int) -> bytes:
    """Where the receiver with ``epoch`` listens."""
    return b"\0pddbridge-kv-%016x" % epoch


def reachable(epoch: int) -> bool:
    """Whether a process of this user and host receives under ``epoch``. Does not wait."""
    if not supported():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(address(epoch))
            check_user(sock)
        except BlockingIOError:
            return True  # its backlog is full: it is there
        except OSError:
            return False
    return True


def listen(epoch: int) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address(epoch))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


async def connect(epoch: int) -> socket.socket:
    """Raises OSError, PermissionError among them when another user listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address(epoch))
        check_user(sock)
    except BaseException:  # cancellation as well: the socket has no owner yet
        sock.close()
        raise
    return sock


def check_user(sock: socket.socket) -> None:
    """Raises PermissionError unless the peer runs as this user: an abstract name may be taken by anybody."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, this process as {os.geteuid()}")


async def send_hello(sock: socket.socket, message: bytes, fd: int) -> None:
    """``message`` with ``fd`` attached. Raises OSError."""
    # A fresh socket's buffer takes a hello at once.
    sent = socket.send_fds(sock, [message], [fd])
    if sent < len(message):
        await asyncio.get_running_loop().sock_sendall(sock, message[sent:])


async def receive_hello(sock: socket.socket) -> tuple[dict[str, str], int]:
    """A hello's body and the descriptor that came with it, which the caller now owns. Raises WireError or OSError."""
    header, fds = await _receive_with_fds(sock, HANDSHAKE_HEADER_BYTES)
    try:
        if len(header) < HANDSHAKE_HEADER_BYTES:
            header += await tcp_io.receive(sock, HANDSHAKE_HEADER_BYTES - len(header))
        _, body_bytes, body_crc = decode_message_header(header, ("hello",))
        body = decode_body(await tcp_io.receive(sock, body_bytes), body_crc)
        if len(fds) != 1:
            raise WireError(WireFault.BODY, f"hello came with {len(fds)} descriptors, 1 is needed")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return body, fds[0]


async def records(sock: socket.socket, size: int) -> AsyncGenerator[list[bytes], None]:
    """Messages of ``size`` bytes, as many at once as are there, for ever. Raises ConnectionClosedError or OSError. To be closed by whoever
    leaves off before that: ``sock`` is watched until then.
    """
    inbox = _Inbox(sock, size)
    try:
        while True:
            yield await inbox.take()
    finally:
        inbox.ignore()


class _Inbox:
    """Reads a socket as soon as something comes, up to so many messages ahead. The loop is told once that the socket is of interest: with
    its own functions, which are told every time and try to read in vain before, to be awakened costs twice as much.
    """

    def __init__(self, sock: socket.socket, size: int) -> None:
        self._sock = sock
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._view, self._filled = memoryview(bytearray(_READ_AHEAD * size)), 0
        self._closed = False
        self._error: OSError | None = None
        self._watched = False
        self._came = asyncio.Event()

    async def take(self) -> list[bytes]:
        """At least one."""
        while self._filled < self._size:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise ConnectionClosedError(clean=self._filled == 0)
            self._watch()
            self._came.clear()
            await self._came.wait()
        whole = self._filled - self._filled % self._size
        taken = [bytes(self._view[start : start + self._size]) for start in range(0, whole, self._size)]
        self._view[: self._filled - whole] = bytes(self._view[whole : self._filled])
        self._filled -= whole
        return taken

    def ignore(self) -> None:
        """Nobody waits on the descriptor any more."""
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._sock)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._sock, self._read)

    def _read(self) -> None:
        try:
            count = self._sock.recv_into(self._view[self._filled :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._error, count = error, 0
        self._filled += count
        self._closed = count == 0
        if self._closed or self._filled == len(self._view):
            self.ignore()
        self._came.set()


async def _receive_with_fds(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """The first bytes, at most ``size``, and the descriptors attached to them. The kernel closes those that do not fit."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    while True:
        with contextlib.suppress(BlockingIOError):
            data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
            break
        await _readable(sock)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise ConnectionClosedError(clean=True)
    return data, fds.tolist()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
