"""What comes over a TCP socket, into the reader's memory: as few reads and as few awakenings as the bytes allow."""

from __future__ import annotations

import array
import fcntl
import socket
import ssl
import termios
from typing import Final

from pddbridge.links import tls_io
from pddbridge.links.readiness import ready
from pddbridge.native.checksum import Checksum

# A reader that has yet to get so much is not awakened for less: what it waits for is of no use before it is whole.
_WORTH_WAKING_BYTES: Final = 256 << 10


class ConnectionClosedError(ConnectionError):
    """The peer closed the connection; ``clean``: between two messages."""

    def __init__(self, clean: bool) -> None:
        super().__init__("closed by the peer" if clean else "closed by the peer inside a message")
        self.clean = clean


class Intake:
    """Reads a socket and counts what comes. ``ahead_bytes``: of what follows a buffer so many bytes may be read with it; then nobody else
    may read the socket. 0: not a byte more than was asked for.
    """

    def __init__(self, sock: socket.socket, ahead_bytes: int = 0) -> None:
        self.num_bytes = 0
        self.num_waits = 0
        self._sock = sock
        self._ahead = memoryview(bytearray(0 if isinstance(sock, ssl.SSLSocket) else ahead_bytes))
        self._unread = self._ahead[:0]
        self._wakes_at_bytes = 1

    @property
    def num_arrived(self) -> int:
        """Bytes that came, also those that wait in the kernel."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._sock.fileno(), termios.FIONREAD, waiting)
        return self.num_bytes + waiting[0]

    async def fill(self, buffer: memoryview, inside: bool = False, checksum: Checksum | None = None) -> int:
        """Fill ``buffer``; ``inside``: it continues a message. Returns its ``checksum``, taken of each piece while that is in the cache; 0
        without one. Raises ConnectionClosedError or OSError.
        """
        size, crc = len(buffer), 0
        done = min(size, len(self._unread))
        buffer[:done], self._unread = self._unread[:done], self._unread[done:]
        if done and checksum is not None:
            crc = checksum(buffer[:done], 0)
        while done < size:
            rest = buffer[done:] if done else buffer
            count = await self._some(rest)
            if count == 0:
                raise ConnectionClosedError(clean=done == 0 and not inside)
            if checksum is not None:
                crc = checksum(rest[:count], crc)
            done += count
        return crc

    async def _some(self, buffer: memoryview) -> int:
        """Bytes read into ``buffer``; 0 at the end of the stream."""
        if isinstance(self._sock, ssl.SSLSocket):
            count = await tls_io.receive_some(self._sock, buffer)
            self.num_bytes += count
            return count
        while True:
            try:
                count = self._sock.recvmsg_into([buffer, self._ahead])[0] if len(self._ahead) else self._sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                await self._wait(len(buffer))
                continue
            self.num_bytes += count
            self._unread = self._ahead[: max(0, count - len(buffer))]
            return min(count, len(buffer))

    async def _wait(self, wanted: int) -> None:
        """Until as much as is ``wanted`` is there, if that is little, or the stream has ended."""
        if len(self._ahead):
            wakes_at = min(wanted, _WORTH_WAKING_BYTES)
            if wakes_at != self._wakes_at_bytes:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
                self._wakes_at_bytes = wakes_at
        self.num_waits += 1
        await ready(self._sock, "in")
