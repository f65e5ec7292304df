"""Goodput of the links between two processes of one host, taken in turns in one run, as ratios to TCP on loopback.

python benchmarks/links_in_site.py [--json FILE] [--rounds N] [--links tcp,shm,nixl] [--what in_place,link_large,link,made,pages]

A transfer of 268 MB, in five ways. In the first, what the link itself takes is counted, in the others the seconds from opening the
transfer until all of it is acknowledged:

*in_place*: blocks that are there, of 8 MiB, 64 MiB at once, in memory that the link lends (``shm``) or in memory of the maker's own
(``tcp``), as workers have them after reading their pages; to a receiver that drops them. The clock stands while blocks are made.

*link*: blocks that are there, in wire order, 4 MiB each and still in the cache, to a receiver that drops them. Shared memory copies them
into slots: ``shm_copied``.

*link_large*: the same with blocks of 8 MiB, as workers read them.

*made*: a thread makes the blocks, 16 MiB at once, by a plain copy of bytes that are in the cache, in memory that the link lends (``shm``)
or in memory of its own that was there (``tcp``); the receiver drops them.

*pages*: the whole way from one engine's pages to another's, as two workers do it: a thread that reads pages in pieces of 16 MiB into wire
order, the link, a thread that places what comes into pages of another layout. Over shared memory twice: ``shm`` with blocks made in slots
that the link lends, ``shm_copied`` with blocks made elsewhere, which it copies.

Prints one row each: median and spread of GB/s, CPU seconds of both processes per GB (the making of blocks included), and the ratio of
medians to TCP's of the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import secrets
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_block import arrays_in, room_for
from pddbridge.kv_convert import KVPool, read_blocks, write_block
from pddbridge.kv_layout import KVLayout, head_major, interleaved_heads
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.links.nixl import NixlAgent, NixlSender, NixlServer
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.slot_sender import SlotSender
from pddbridge.links.tcp import Handshake, KVSender, KVServer
from pddbridge.native.checksum import Checksum, fastest_checksum
from pddbridge.native.copy import fastest_copy
from pddbridge.native.moves import native_moves

SPEC: Final = KVSpec.gqa(32, 8, 128, "bfloat16")
TOKENS: Final = TokenRange(0, 2048)  # 268 MB
PAGE_SIZE: Final = 16
SMALL_TOKENS: Final = 64  # 4 MiB of one plane
# As a worker reads: see pdd.worker.executor.ExecutorLimits.
READ_TOKENS: Final = (16 << 20) // SPEC.bytes_per_token
WINDOW_BYTES: Final = 64 << 20
SENDER: Final = Handshake(1, "benchmark", SPEC, 11, "sender")
WARM_UP_ROUNDS: Final = 1
TARGET: Final = 4.0
COPIED: Final = "shm_copied"
AIMED_AT: Final = (("in_place", "shm"), ("link_large", COPIED), ("link", COPIED), ("made", "shm"), ("pages", "shm"))

# Pushes all of a transfer; or an awaitable that does, and gives the seconds that count.
Feed = Callable[[OutgoingTransfer, "_Acked"], "Awaitable[float] | None"]
Results = dict[tuple[str, str], list[tuple[float, float]]]
# Blocks of a token range, made in the arrays that are given, one per plane, or elsewhere.
Make = Callable[[TokenRange, "tuple[np.ndarray, ...] | None"], tuple[KVBlock, ...]]


def checksum() -> Checksum:
    """As workers have it."""
    found, fallbacks = fastest_checksum(None)
    if fallbacks:
        print(f"the package's checksum: {', '.join(fallbacks)}")
    return found


def pages_of(layout: KVLayout) -> KVPool:
    """Pages of all ``TOKENS``, touched, moved by compiled C++ where that is possible."""
    native, fallbacks = native_moves(None)
    if fallbacks:
        print(f"numpy moves everything: {', '.join(fallbacks)}")
    pool = KVPool.zeros(layout, SPEC, len(TOKENS) // PAGE_SIZE, native)
    for arrays in pool.arrays:
        for array in arrays:
            array.view(np.uint16)[...] = 1
    return pool


def random_pages() -> np.ndarray:
    """A page table whose pages lie anywhere in a pool."""
    return np.random.default_rng(2).permutation(len(TOKENS) // PAGE_SIZE)


async def _serve(pipe: Connection, epoch: int, num_transfers: int, first_placed: int, with_nixl: bool) -> None:
    """Transfers from ``first_placed`` on are placed into pages, those before are dropped."""
    handshake = replace(SENDER, epoch=epoch, name="receiver")
    pool, table = pages_of(head_major(PAGE_SIZE, SPEC.dtype)), random_pages()
    placing = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    async def place(transfer_id: int, block: KVBlock) -> None:
        if transfer_id >= first_placed:
            await loop.run_in_executor(placing, write_block, pool, table, block)

    server = KVServer(handshake, place, lambda *_: None, failed, checksum=checksum())
    for transfer_id in range(1, num_transfers + 1):
        server.expect(transfer_id, TOKENS)
    shm = ShmServer(handshake, server.incoming)
    shm.start()
    ports = {"tcp": await server.start("127.0.0.1", 0), "shm": 0}
    nixl: NixlServer | None = None
    if with_nixl:
        agent = NixlAgent("receiver")
        await agent.start()
        nixl = NixlServer(handshake, server.incoming, agent)
        ports["nixl"] = await nixl.start("127.0.0.1")
    pipe.send(ports)
    while await asyncio.to_thread(pipe.recv) is not None:
        pipe.send(time.process_time())
    if nixl is not None:
        await nixl.close()
        await agent.close()
    await shm.close()
    await server.close()


def _receiver(pipe: Connection, epoch: int, num_transfers: int, first_placed: int, with_nixl: bool) -> None:
    asyncio.run(_serve(pipe, epoch, num_transfers, first_placed, with_nixl))


class _Acked:
    """Bytes of a transfer that the receiver has acknowledged."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._grew = asyncio.Event()

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._grew.set()

    async def reach(self, num_bytes: int) -> None:
        while self.num_bytes < num_bytes:
            self._grew.clear()
            await self._grew.wait()


class _Links:
    """The sending process: opens one transfer after another."""

    def __init__(self, pipe: Connection, epoch: int, links: list[str], stack: AsyncExitStack) -> None:
        self._pipe = pipe
        self._epoch = epoch
        self._links = links
        self._stack = stack
        self._senders: dict[str, KVSender | SlotSender] = {}
        self._num_opened = 0
        self._ports: dict[str, int] = {}

    async def start(self) -> None:
        self._ports = self._pipe.recv()
        self._senders = {"tcp": KVSender(SENDER, checksum=checksum()), "shm": ShmSender(SENDER, copy=fastest_copy(None)[0])}
        if "nixl" in self._links:
            agent = NixlAgent("sender")
            await agent.start()
            self._stack.push_async_callback(agent.close)
            self._senders["nixl"] = NixlSender(SENDER, agent)
        for sender in self._senders.values():
            self._stack.push_async_callback(sender.close)

    async def timed(self, link: str, feed: Feed) -> tuple[float, float]:
        """(GB/s, CPU seconds of both processes per GB) of one transfer. ``feed`` pushes."""
        self._num_opened += 1
        acked = _Acked()
        cpu_s = time.process_time() + self._cpu_s()
        started_s = time.perf_counter()
        name = "shm" if link == COPIED else link
        transfer = self._senders[name].open("127.0.0.1", self._ports[name], self._epoch, self._num_opened, TOKENS, on_acked=acked.add)
        fed = feed(transfer, acked)
        counted_s = None if fed is None else await fed
        report = await transfer.done()
        taken_s = time.perf_counter() - started_s if counted_s is None else counted_s
        cpu_s = time.process_time() + self._cpu_s() - cpu_s
        return report.bytes / 1e9 / taken_s, cpu_s / (report.bytes / 1e9)

    @property
    def copied(self) -> tuple[int, int]:
        """Frames that were made in a slot and that were copied into one."""
        counters = self._senders["shm"].counters
        return counters.frames_in_place, counters.frames_copied

    def _cpu_s(self) -> float:
        self._pipe.send("cpu")
        cpu_s: float = self._pipe.recv()
        return cpu_s


def rows_of(way: str, links: list[str]) -> list[str]:
    """What is measured in turns, one transfer each."""
    over_shm = {"in_place": ("shm",), "made": ("shm",), "pages": (COPIED, "shm")}.get(way, (COPIED,))
    return [name for link in links for name in (over_shm if link == "shm" else (link,))]


async def _measure(pipe: Connection, epoch: int, links: list[str], rounds: int, ways: list[str]) -> Results:
    results: Results = {}
    async with AsyncExitStack() as stack:
        opened = _Links(pipe, epoch, links, stack)
        await opened.start()
        for way in ways:
            feed = FEEDS[way]()
            for round_number in range(WARM_UP_ROUNDS + rounds):
                for link in rows_of(way, links):
                    before = opened.copied
                    row = await opened.timed(link, feed(link))
                    made, copied = (now - then for now, then in zip(opened.copied, before, strict=True))
                    assert link not in ("shm", COPIED) or (made if link == COPIED else copied) == 0, f"{link}: {made} made, {copied} copied"
                    if round_number >= WARM_UP_ROUNDS:
                        results.setdefault((way, link), []).append(row)
    return results


def _in_place_feed() -> Callable[[str], Feed]:
    make = _copied_anew()

    async def push_by_batches(transfer: OutgoingTransfer, acked: _Acked) -> float:
        counted_s, batch = 0.0, READ_TOKENS * (WINDOW_BYTES // (READ_TOKENS * SPEC.bytes_per_token))
        for first in range(0, len(TOKENS), batch):
            blocks = [block for tokens in _pieces(first, first + batch) for block in make(tokens, _lent(transfer, tokens))]
            started_s = time.perf_counter()
            _push(transfer, tuple(blocks))
            await acked.reach((first + batch) * SPEC.bytes_per_token)
            counted_s += time.perf_counter() - started_s
            del blocks  # what was lent is free again
        return counted_s

    return lambda link: push_by_batches


def _pieces(start: int, stop: int) -> Iterator[TokenRange]:
    return (TokenRange(first, first + READ_TOKENS) for first in range(start, stop, READ_TOKENS))


def _lent(transfer: OutgoingTransfer, tokens: TokenRange) -> tuple[np.ndarray, ...] | None:
    memory = None if transfer.lend is None else transfer.lend(room_for(SPEC, len(tokens)), False)
    return None if memory is None else arrays_in(memory, SPEC, len(tokens))


def _link_feed(num_tokens: int) -> Callable[[str], Feed]:
    piece, starts = _piece(num_tokens), range(0, len(TOKENS), num_tokens)
    blocks = [block for start in starts for block in _blocks(TokenRange(start, start + num_tokens), (piece, piece))]

    def push_all(transfer: OutgoingTransfer, _: _Acked) -> None:
        _push(transfer, tuple(blocks))

    return lambda link: push_all


def _made_feed() -> Callable[[str], Feed]:
    make = _copied_anew()
    return lambda link: _Maker(make, lends=link != COPIED)


def _copied_anew() -> Make:
    piece = _piece(READ_TOKENS)
    # More than may be under way. They hold equal bytes, so that writing one anew, which is timed, changes nothing.
    private = itertools.cycle([tuple(piece.copy() for _ in range(2)) for _ in range(2 * WINDOW_BYTES // (2 * piece.nbytes))])

    def make(tokens: TokenRange, out: tuple[np.ndarray, ...] | None) -> tuple[KVBlock, ...]:
        made = next(private) if out is None else out
        for array in made:
            np.copyto(array.view(np.uint16), piece.view(np.uint16))
        return _blocks(tokens, made)

    return make


def _pages_feed() -> Callable[[str], Feed]:
    pool, table = pages_of(interleaved_heads(PAGE_SIZE, SPEC.dtype)), random_pages()
    return lambda link: _Maker(lambda tokens, out: read_blocks(pool, table, tokens, out), lends=link != COPIED)


def _piece(num_tokens: int) -> np.ndarray:
    """Random values of one plane, [layers, tokens, heads, dim]."""
    return np.random.default_rng(1).integers(0, 1 << 16, (32, num_tokens, 8, 128), np.uint16).view(SPEC.np_dtype)


def _blocks(tokens: TokenRange, planes: tuple[np.ndarray, ...]) -> tuple[KVBlock, ...]:
    named = zip(SPEC.groups[0].planes, planes, strict=True)
    return tuple(KVBlock(plane.name, LayerRange(0, 32), tokens, HeadRange(0, 8), values) for plane, values in named)


class _Maker:
    """Makes blocks in a thread of its own, ``WINDOW_BYTES`` ahead of the receiver at most, as a worker's step thread does."""

    def __init__(self, make: Make, *, lends: bool) -> None:
        self._make = make
        self._lends = lends

    def __call__(self, transfer: OutgoingTransfer, acked: _Acked) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop, transfer, acked), daemon=True).start()

    def _run(self, loop: asyncio.AbstractEventLoop, transfer: OutgoingTransfer, acked: _Acked) -> None:
        for tokens in _pieces(0, len(TOKENS)):
            while tokens.start * SPEC.bytes_per_token - acked.num_bytes > WINDOW_BYTES:
                time.sleep(0.0002)
            out = _lent(transfer, tokens) if self._lends else None
            loop.call_soon_threadsafe(_push, transfer, self._make(tokens, out))
            del out


def _push(transfer: OutgoingTransfer, blocks: tuple[KVBlock, ...]) -> None:
    for block in blocks:
        transfer.push(block)


FEEDS: Final[dict[str, Callable[[], Callable[[str], Feed]]]] = {
    "in_place": _in_place_feed,
    "link_large": lambda: _link_feed(READ_TOKENS),
    "link": lambda: _link_feed(SMALL_TOKENS),
    "made": _made_feed,
    "pages": _pages_feed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", default="tcp,shm")
    parser.add_argument("--what", default=",".join(FEEDS))
    arguments = parser.parse_args()
    links, ways = arguments.links.split(","), arguments.what.split(",")
    ours, theirs = multiprocessing.Pipe()
    rounds = arguments.rounds + WARM_UP_ROUNDS
    num_dropped, num_placed = (
        rounds * sum(len(rows_of(way, links)) for way in ways if (way == "pages") is placed) for placed in (False, True)
    )
    epoch = secrets.randbits(64)
    settings = (epoch, num_dropped + num_placed, num_dropped + 1, "nixl" in links)
    process = multiprocessing.get_context("spawn").Process(target=_receiver, args=(theirs, *settings))
    process.start()
    try:
        results = asyncio.run(_measure(ours, epoch, links, arguments.rounds, ways))
    finally:
        ours.send(None)
        process.join()
    medians = {key: statistics.median(goodput for goodput, _ in rows) for key, rows in results.items()}
    table = [
        {
            "what": way,
            "link": link,
            "goodput_gb_s": round(medians[way, link], 3),
            "min_gb_s": round(min(goodput for goodput, _ in rows), 3),
            "max_gb_s": round(max(goodput for goodput, _ in rows), 3),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in rows), 3),
            "ratio_to_tcp": round(medians[way, link] / medians[way, "tcp"], 2) if (way, "tcp") in medians else None,
            "target": TARGET if (way, link) in AIMED_AT else None,
        }
        for (way, link), rows in results.items()
    ]
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items() if value is not None))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
