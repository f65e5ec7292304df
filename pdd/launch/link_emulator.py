"""The wide-area link on one machine: a TCP proxy per worker port, all of a site pair sharing one line per direction. Needs no root.

It carries KV *and* control, so that both feel the same rate, round trip and jitter: see :mod:`pdd.launch.shaper`. And it lets go wrong
what its script says: see :mod:`pdd.faults`.
Run by the launcher as a process of its own: ``python -m pdd.launch.link_emulator --config C --topology T``.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pdd.config import EmulatedLink, LaunchConfig, load
from pdd.faults import Fault, LinkOrder, PortKind
from pdd.launch import child
from pdd.launch.link_connection import Connection, reset_on_close
from pdd.launch.shaper import Direction
from pdd.settle import one_heap, settle
from pdd.topology import Address, Topology

# What the kernel may take of a connection before the line does: so long a part of the rate, as a narrow link's first router would.
_TAKEN_S = 0.01
_MIN_TAKEN_BYTES = 64 * 1024
_MAX_TAKEN_BYTES = 512 * 1024


@dataclass(frozen=True)
class ProxyPort:
    """Connections to ``listen`` (at ``near`` site) are carried to ``target`` (at ``far`` site)."""

    near: str
    far: str
    listen: Address
    target: Address
    carries: PortKind = "kv"


def proxy_ports(config: LaunchConfig, topology: Topology) -> list[tuple[ProxyPort, EmulatedLink]]:
    """Every port that has to be emulated: control and KV of each worker, from each site that reaches it over an emulated link."""
    found = []
    for place in topology.workers:
        for route in place.routes:
            link = config.link(route.from_site, place.site)
            if link is not None and link.emulate is not None:
                found.append((ProxyPort(route.from_site, place.site, route.control, place.control, "control"), link.emulate))
                found.append((ProxyPort(route.from_site, place.site, route.kv, place.kv, "kv"), link.emulate))
    return found


class _Entrance:
    """One listening port: its live connections, and what its link's script has for them. Times of ``at_s`` count from here."""

    def __init__(self, port: ProxyPort, link: EmulatedLink, there: Direction, back: Direction) -> None:
        self.port = port
        self.script = (*link.faults, *(link.random_faults.draw() if link.random_faults else ()))
        self._there = there
        self._back = back
        self._loop = asyncio.get_running_loop()
        self._num_accepted = 0
        self._live: set[Connection] = set()
        self._lasting: list[tuple[Fault, float]] = []
        now_s = self._loop.time()
        self.timers = [self._loop.call_at(now_s + f.at_s, self.strike, f) for f in self.script if f.at_s is not None]

    def strike(self, fault: Fault) -> None:
        """Let ``fault`` happen now to every live connection, and to those accepted while it lasts."""
        if fault.port not in (None, self.port.carries):
            return
        if fault.kind in ("stall", "black_hole"):
            self._lasting.append((fault, math.inf if fault.duration_s is None else self._loop.time() + fault.duration_s))
        for connection in self._live:
            connection.strike(fault)

    async def carry(self, near: socket.socket) -> None:
        """One connection from accept to end. A far end that cannot be reached shows as a reset, as it would without us."""
        number, self._num_accepted = self._num_accepted, self._num_accepted + 1
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            for sock in (near, far):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # The kernel accepted at once; a real connection would have taken one round trip.
            await asyncio.sleep(self._there.delay_s + self._back.delay_s)
            await self._loop.sock_connect(far, (self.port.target.host, self.port.target.port))
            own = [f for f in self.script if f.at_s is None and f.concerns(self.port.carries, number)]
            connection = Connection(near, far, self._there, self._back, own)
            self._live.add(connection)
            try:
                self._strike_new(connection)
                await connection.run()
            finally:
                self._live.discard(connection)
        except OSError:
            reset_on_close(near)
        finally:
            near.close()
            far.close()

    def _strike_new(self, connection: Connection) -> None:
        now_s = self._loop.time()
        self._lasting = [(fault, until_s) for fault, until_s in self._lasting if until_s > now_s]
        for fault, until_s in self._lasting:
            left_s = None if math.isinf(until_s) else until_s - now_s
            connection.strike(fault.model_copy(update={"duration_s": left_s}))


class LinkEmulator:
    """All proxies of one process. ``directions`` are keyed by (from site, to site)."""

    def __init__(self) -> None:
        self.directions: dict[tuple[str, str], Direction] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        self._entrances: list[_Entrance] = []
        self._open: dict[Address, tuple[socket.socket, _Entrance, asyncio.Task[None]]] = {}

    async def add(self, port: ProxyPort, link: EmulatedLink) -> Address:
        """Listen; returns the address really bound (a port of 0 picks one). Raises OSError when it cannot."""
        for ends in ((port.near, port.far), (port.far, port.near)):
            if ends not in self.directions:
                self.directions[ends] = Direction(link, seed=len(self.directions))
                self._spawn(self.directions[ends].run())
        listener = socket.create_server((port.listen.host, port.listen.port), backlog=128)
        listener.setblocking(False)
        # Else the kernel takes megabytes that the line has not carried, and what a sender chooses to send next leaves seconds later.
        taken_bytes = max(_MIN_TAKEN_BYTES, int(link.rate_mbit_s * 1e6 / 8 * _TAKEN_S))
        if taken_bytes <= _MAX_TAKEN_BYTES:  # above, the kernel's own choice is no more
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, taken_bytes)
        self._listeners.append(listener)
        entrance = _Entrance(port, link, self.directions[port.near, port.far], self.directions[port.far, port.near])
        self._entrances.append(entrance)
        bound = Address(port.listen.host, listener.getsockname()[1])
        self._open[bound] = (listener, entrance, self._spawn(self._accept(listener, entrance)))
        return bound

    async def follow(self, ports: list[tuple[ProxyPort, EmulatedLink]]) -> None:
        """Listen on exactly these from now on: workers have joined or left. Connections through a port that is gone go on until they end.
        Raises as ``add``.
        """
        wanted = {port.listen for port, _ in ports}
        for listen in [listen for listen in self._open if listen not in wanted]:
            listener, entrance, accepting = self._open.pop(listen)
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listener.close()
            self._listeners.remove(listener)
            self._entrances.remove(entrance)
            for timer in entrance.timers:
                timer.cancel()
        for port, link in ports:
            if port.listen not in self._open:
                await self.add(port, link)

    def strike(self, fault: Fault) -> None:
        """Let ``fault`` happen now on every link, whatever its trigger says: see :meth:`_Entrance.strike`."""
        for entrance in self._entrances:
            entrance.strike(fault)

    def obey(self, line: bytes) -> None:
        """What the launcher writes to stdin while the emulator runs, one :class:`LinkOrder` a line. A line that is none is reported."""
        try:
            order = LinkOrder.model_validate_json(line)
        except ValidationError as error:
            child.report("refused", why=str(error).splitlines()[0])
            return
        if order.fault is not None:
            self.strike(order.fault)
        else:
            for direction in self.directions.values():
                direction.set_rate(order.rate_mbit_s)
        child.report("obeyed")

    async def close(self) -> None:
        for entrance in self._entrances:
            for timer in entrance.timers:
                timer.cancel()
        for listener in self._listeners:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coro: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket, entrance: _Entrance) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            self._spawn(entrance.carry(near))


async def _reload(emulator: LinkEmulator, config: LaunchConfig, topology_file: Path) -> None:
    try:
        await emulator.follow(proxy_ports(config, Topology.load(topology_file)))
        child.report("reloaded", order="reload")
    except (OSError, ValueError, KeyError) as error:
        child.report("refused", order="reload", why=str(error))


async def _serve(config: LaunchConfig, topology_file: Path) -> None:
    emulator, topology = LinkEmulator(), Topology.load(topology_file)
    reloads: set[asyncio.Task[None]] = set()

    def on_line(line: bytes) -> None:
        if line.strip() == b"reload":
            reloads.add(asyncio.create_task(_reload(emulator, config, topology_file)))
        else:
            emulator.obey(line)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    child.when_parent_ends(loop, stop, on_line)
    for port, link in proxy_ports(config, topology):
        await emulator.add(port, link)
    settle()
    child.report("ready")
    alive = asyncio.create_task(child.stay_alive())
    await stop.wait()
    alive.cancel()
    await emulator.close()


def main() -> None:
    one_heap()
    parser = argparse.ArgumentParser(prog="pdd.launch.link_emulator")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--topology", type=Path, required=True)
    args = parser.parse_args()
    try:
        asyncio.run(_serve(load(args.config), args.topology))
    except (ValueError, OSError) as error:
        print(f"link emulator: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
