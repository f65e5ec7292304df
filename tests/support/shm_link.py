"""A receiver and a sender over shared memory in one process, or with one of them as a child, for tests of the link."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, write_block
from pddbridge.kv_layout import head_major
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.shm import ShmSender, ShmServer, SlotSettings
from pddbridge.links.tcp import Handshake, KVServer, TransferFailed, TransferReport
from tests.support.kv import blocks_of, canary_pool, fill_slowly, same_pools
from tests.support.slot_link_child import PLANES, SENDER, SPEC, TOKENS, TRANSFER_ID

ROOT = Path(__file__).parents[2]
FEW = SlotSettings(num_slots=3, backoff_s=0.01)


@dataclass
class Target:
    """A receiving process: both of its servers, its pool, what it was told."""

    epoch: int
    server: KVServer
    shm: ShmServer
    port: int
    pool: KVPool
    table: np.ndarray
    completed: dict[int, TransferReport] = field(default_factory=dict)
    failed: dict[int, TransferFailed] = field(default_factory=dict)
    may_place: asyncio.Event = field(default_factory=asyncio.Event)
    num_placing: int = 0
    num_placed: int = 0
    place_error: Exception | None = None

    async def place(self, transfer_id: int, block: KVBlock) -> None:
        self.num_placing += 1
        try:
            await self.may_place.wait()
            if self.place_error is not None:
                raise self.place_error
            write_block(self.pool, self.table, block)
            self.num_placed += 1
        finally:
            self.num_placing -= 1


@asynccontextmanager
async def receiving(**changes: object) -> AsyncIterator[Target]:
    epoch = secrets.randbits(64)
    handshake = replace(SENDER, epoch=epoch, name="main-1", **changes)  # type: ignore[arg-type]
    target: Target

    async def place(transfer_id: int, block: KVBlock) -> None:
        await target.place(transfer_id, block)

    server = KVServer(
        handshake,
        place,
        lambda transfer_id, report: target.completed.update({transfer_id: report}),
        lambda transfer_id, failure: target.failed.update({transfer_id: failure}),
    )
    shm = ShmServer(handshake, server.incoming, handshake_timeout_s=0.3)
    shm.start()
    pool = canary_pool(head_major(12, SPEC.dtype), SPEC, 12)
    target = Target(epoch, server, shm, await server.start("127.0.0.1", 0), pool, np.random.default_rng(1).permutation(12))
    target.may_place.set()
    try:
        yield target
    finally:
        target.may_place.set()
        await shm.close()
        await server.close()


@asynccontextmanager
async def sending(settings: SlotSettings | None = None, handshake: Handshake = SENDER) -> AsyncIterator[ShmSender]:
    sender = ShmSender(handshake, settings)
    try:
        yield sender
    finally:
        await sender.close()


def open_to(sender: ShmSender, target: Target, transfer_id: int = TRANSFER_ID, tokens: TokenRange = TOKENS) -> OutgoingTransfer:
    return sender.open("127.0.0.1", target.port, target.epoch, transfer_id, tokens)


def push_in_chunks(transfer: OutgoingTransfer, tokens: TokenRange = TOKENS, chunk: int = 16) -> None:
    for start in range(tokens.start, tokens.stop, chunk):
        for block in blocks_of(SPEC, PLANES, TokenRange(start, min(start + chunk, tokens.stop))):
            transfer.push(block)


def assert_exact(target: Target, tokens: TokenRange = TOKENS) -> None:
    """``tokens`` are there bit by bit and nothing else was touched."""
    expected = canary_pool(target.pool.layout, SPEC, target.pool.num_pages)
    fill_slowly(expected, target.table, PLANES, LayerRange(0, 4), tokens, HeadRange(0, 3))
    assert same_pools(target.pool, expected)


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def num_arenas() -> int:
    """Mappings of and descriptors for arenas that this process has."""
    gc.collect()
    mapped = sum("memfd:pdd-kv" in line for line in Path("/proc/self/maps").read_text().splitlines())
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return mapped + sum("memfd:pdd-kv" in link for link in links)


@asynccontextmanager
async def child(role: str, epoch: int) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = (sys.executable, "-m", "tests.support.slot_link_child", role, "shm", str(epoch))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def says(process: asyncio.subprocess.Process, word: str) -> None:
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 30) == f"{word}\n".encode()


def drop_connections() -> None:
    """As if every connection broke at its receiving end."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith("kv slot server-from-"):
            task.cancel()
