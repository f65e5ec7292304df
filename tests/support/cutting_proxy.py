"""A TCP proxy for tests that hurts the client's bytes at a chosen place: cuts, flips a bit, or stops forwarding."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """At byte ``at`` of what the client sends on one connection. ``stall``: no more is forwarded in either direction, nothing is closed.
    ``cut_replies`` cuts at byte ``at`` of what the server sends.
    """

    kind: Literal["cut", "flip", "stall", "cut_replies"]
    at: int


class CuttingProxy:
    """Connection number i suffers ``faults[i]``; later ones are forwarded faithfully."""

    def __init__(self, target_port: int, faults: list[Fault]) -> None:
        self.num_connections = 0
        self._target_port = target_port
        self._faults = faults
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: list[asyncio.Event] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def silence_all(self) -> None:
        """Forward nothing more of the connections that are open, and close nothing: what a NAT does to a flow that was idle too long."""
        for stalled in self._open:
            stalled.set()

    def drop_all(self) -> None:
        """Break every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._faults[self.num_connections] if self.num_connections < len(self._faults) else None
        stalled = asyncio.Event()
        self._open.append(stalled)  # before anybody can see that there is one more
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pair = {writer, up_writer}
        self._writers |= pair
        with contextlib.suppress(OSError):
            forth = self._pump(reader, up_writer, fault if fault and fault.kind != "cut_replies" else None, stalled)
            back = self._pump(up_reader, writer, fault if fault and fault.kind == "cut_replies" else None, stalled)
            pumps = {asyncio.create_task(forth), asyncio.create_task(back)}
            self._tasks |= pumps
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                self._tasks -= pumps
                for one in pair:
                    one.transport.abort()
                self._writers -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None, stalled: asyncio.Event) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if stalled.is_set():
                    await asyncio.Event().wait()
                if fault and done <= fault.at < done + len(data):
                    here = fault.at - done
                    if fault.kind == "flip":
                        data = data[:here] + bytes([data[here] ^ 1]) + data[here + 1 :]
                    else:
                        writer.write(data[:here])
                        await writer.drain()
                        if fault.kind == "stall":
                            stalled.set()
                            await asyncio.Event().wait()
                        return
                done += len(data)
                writer.write(data)
                await writer.drain()
