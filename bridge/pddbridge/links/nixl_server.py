"""The receiving end of the NIXL link in one process: memory that senders write into, and the messages that say what is there."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncGenerator, Collection

import numpy as np

from pddbridge.kv_handshake import Handshake
from pddbridge.kv_notes import NOTE_BYTES, decode_note
from pddbridge.kv_wire import Kind, WireError, WireFault, check_prefix
from pddbridge.links import shm_io, tcp_io
from pddbridge.links.incoming import IncomingTransfers
from pddbridge.links.nixl_agent import TAG_BYTES, NixlAgent, NixlError
from pddbridge.links.nixl_grant import Grant, send_grant
from pddbridge.links.slot_server import Landing, SlotServer
from pddbridge.links.slots import MESSAGE_BYTES, SLOT_BYTES


class NixlServer(SlotServer):
    """``agent`` is started and closed by its owner. Each connection may write into ``num_slots`` slots of its own, never into pages."""

    def __init__(
        self, handshake: Handshake, incoming: IncomingTransfers, agent: NixlAgent, num_slots: int = 4, peers: Collection[str] | None = None
    ) -> None:
        super().__init__(handshake, incoming, max_placing=num_slots, peers=peers)
        self._agent = agent
        self._num_slots = num_slots

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on ``host`` alone and return the port (``port`` 0: a free one). Raises OSError."""
        listener = await tcp_io.listen(host, port)
        self._listen(listener)
        return int(listener.getsockname()[1])

    async def _admit(self, sock: socket.socket) -> Landing:
        tcp_io.prepare(sock)
        _, body = await tcp_io.receive_message(sock, ("hello",))
        await self._greet(sock, body)
        memory, registration = await self._agent.register(self._num_slots * SLOT_BYTES)
        tag = secrets.token_bytes(TAG_BYTES)
        landing = _NixlLanding(sock, self._agent, tag, memory, registration)
        try:
            metadata = await self._agent.call(lambda agent: agent.get_agent_metadata())
            await send_grant(sock, Grant(memory.ctypes.data, self._num_slots, tag, metadata))
        except BaseException:  # cancellation as well: it has no owner yet
            await asyncio.shield(landing.close())
            raise
        return landing


class _NixlLanding:
    """See :class:`Landing`. Memory that a write may still reach when the connection ends is quarantined."""

    def __init__(self, sock: socket.socket, agent: NixlAgent, tag: bytes, memory: np.ndarray, registration: object) -> None:
        self.memory = memory
        self._sock = sock
        self._agent = agent
        self._tag = tag
        self._registration = registration
        self._num_awaited = 0
        self._queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        agent.listen(tag, self._announced)
        self._reading = asyncio.create_task(self._read(), name="kv-nixl-notes")

    async def messages(self) -> AsyncGenerator[list[bytes], None]:
        while True:
            message = await self._queue.get()
            if isinstance(message, Exception):
                raise message
            yield [message]

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._agent.forget(self._tag)
        with contextlib.suppress(NixlError):
            await self._agent.give_back(self.memory, self._registration, may_be_written=self._num_awaited > 0)

    def _announced(self, message: bytes) -> None:
        self._num_awaited -= 1
        if len(message) == MESSAGE_BYTES:
            self._queue.put_nowait(message)
        else:
            self._queue.put_nowait(WireError(WireFault.TRUNCATED, f"a message of {len(message)} bytes, must be {MESSAGE_BYTES}"))

    def _noted(self, message: bytes) -> None:
        if check_prefix(message, (Kind.STOP, Kind.PING)) is Kind.STOP:
            self._queue.put_nowait(message)
            return
        number, num_slots = decode_note(message[:NOTE_BYTES], (Kind.PING,)).sequence, len(self.memory) // SLOT_BYTES
        if number > num_slots:
            raise WireError(WireFault.RANGE, f"{number} frames are said to come, there are {num_slots} slots")
        self._num_awaited += number
        self._agent.await_messages(self._tag, number)

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(shm_io.records(self._sock, MESSAGE_BYTES)) as batches:
                async for messages in batches:
                    for message in messages:
                        self._noted(message)
        except (WireError, OSError) as error:
            self._queue.put_nowait(error)
