"""The receiving end of the shared-memory link: takes frames from senders of this host and user."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import numpy as np

from pddbridge.kv_wire import WireError, WireFault
from pddbridge.links import shm_io
from pddbridge.links.shm_arena import map_arena
from pddbridge.links.slot_server import Landing, SlotServer
from pddbridge.links.slots import MESSAGE_BYTES


@dataclass(frozen=True)
class _Mapped:
    """An arena that its sender shared. It lives as long as somebody reads it."""

    memory: np.ndarray
    sock: socket.socket

    def messages(self) -> AsyncGenerator[list[bytes], None]:
        return shm_io.records(self.sock, MESSAGE_BYTES)

    async def close(self) -> None:
        return None


class ShmServer(SlotServer):
    """See :class:`SlotServer`."""

    def start(self) -> None:
        """Listen under the handshake's epoch. Raises OSError, also where the platform lacks the link."""
        if not shm_io.supported():
            raise OSError("shared-memory link: this platform has no memfd or no peer credentials")
        self._listen(shm_io.listen(self._handshake.epoch))

    async def _admit(self, sock: socket.socket) -> Landing:
        shm_io.check_user(sock)
        body, fd = await shm_io.receive_hello(sock)
        try:
            arena = map_arena(fd)
        except (ValueError, OSError) as error:
            raise WireError(WireFault.BODY, str(error)) from error
        await self._greet(sock, body)
        return _Mapped(arena, sock)
