"""The wide-area link on one machine: a TCP proxy per worker port, all of a site pair sharing one line per direction. Needs no root.

It carries KV *and* control, so that both feel the same rate, round trip and jitter. See :mod:`pdd.launch.shaper` for the timing.
Run by the launcher as a process of its own: ``python -m pdd.launch.link_emulator --config C --topology T``.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from pdd.config import EmulatedLink, LaunchConfig, load
from pdd.launch import child
from pdd.launch.shaper import Direction, Flow
from pdd.topology import Address, Topology

_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class ProxyPort:
    """Connections to ``listen`` (at ``near`` site) are carried to ``target`` (at ``far`` site)."""

    near: str
    far: str
    listen: Address
    target: Address


def proxy_ports(config: LaunchConfig, topology: Topology) -> list[tuple[ProxyPort, EmulatedLink]]:
    """Every port that has to be emulated: control and KV of each worker, from each site that reaches it over an emulated link."""
    found = []
    for place in topology.workers:
        for route in place.routes:
            link = config.link(route.from_site, place.site)
            if link is not None and link.emulate is not None:
                found.append((ProxyPort(route.from_site, place.site, route.control, place.control), link.emulate))
                found.append((ProxyPort(route.from_site, place.site, route.kv, place.kv), link.emulate))
    return found


class _Writer:
    """Delivers a flow's bytes to a socket in order, without blocking the line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def put(self, data: bytes) -> None:
        self._queue.append(data)
        self._wake.set()

    @property
    def queued_bytes(self) -> int:
        return sum(map(len, self._queue))

    async def run(self) -> None:
        """Until the end of the stream, which is passed on as a half-close."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            data = self._queue[0]
            if not data:
                self._sock.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sock, data)
            self._queue.popleft()


class LinkEmulator:
    """All proxies of one process. ``directions`` are keyed by (from site, to site)."""

    def __init__(self) -> None:
        self.directions: dict[tuple[str, str], Direction] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []

    async def add(self, port: ProxyPort, link: EmulatedLink) -> Address:
        """Listen; returns the address really bound (a port of 0 picks one). Raises OSError when it cannot."""
        for ends in ((port.near, port.far), (port.far, port.near)):
            if ends not in self.directions:
                self.directions[ends] = Direction(link, seed=len(self.directions))
                self._spawn(self.directions[ends].run())
        listener = socket.create_server((port.listen.host, port.listen.port), backlog=128)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener, port))
        return Address(port.listen.host, listener.getsockname()[1])

    async def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coro: Coroutine[object, None, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, port: ProxyPort) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            self._spawn(self._carry(near, port))

    async def _carry(self, near: socket.socket, port: ProxyPort) -> None:
        """One connection from accept to end. A far end that cannot be reached shows as a reset, as it would without us."""
        loop = asyncio.get_running_loop()
        there, back = self.directions[port.near, port.far], self.directions[port.far, port.near]
        near.setblocking(False)
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        far.setblocking(False)
        try:
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The kernel accepted at once; a real connection would have taken one round trip.
            await asyncio.sleep(there.delay_s + back.delay_s)
            await loop.sock_connect(far, (port.target.host, port.target.port))
            jobs = [asyncio.ensure_future(_one_way(a, b, d)) for a, b, d in ((near, far, there), (far, near, back))]
            try:
                await asyncio.gather(*jobs)
            finally:
                for job in jobs:
                    job.cancel()
        except OSError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        finally:
            near.close()
            far.close()


async def _one_way(source: socket.socket, sink: socket.socket, direction: Direction) -> None:
    loop = asyncio.get_running_loop()
    writer = _Writer(sink)
    flow = Flow(direction, writer.put)
    delivery = asyncio.ensure_future(writer.run())
    try:
        while not delivery.done():
            if flow.buffered_bytes + writer.queued_bytes >= direction.buffer_limit_bytes:
                await asyncio.sleep(0.001)
                continue
            data = await loop.sock_recv(source, _READ_BYTES)
            flow.offer(data)
            if not data:
                break
        await delivery
    finally:
        flow.close()
        delivery.cancel()


async def _serve(config: LaunchConfig, topology: Topology) -> None:
    emulator = LinkEmulator()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    child.when_parent_ends(loop, stop)
    for port, link in proxy_ports(config, topology):
        await emulator.add(port, link)
    child.report("ready")
    await stop.wait()
    await emulator.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="pdd.launch.link_emulator")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--topology", type=Path, required=True)
    args = parser.parse_args()
    try:
        asyncio.run(_serve(load(args.config), Topology.load(args.topology)))
    except (ValueError, OSError) as error:
        print(f"link emulator: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
