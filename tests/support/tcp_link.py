"""Both ends of the TCP link in one process, with pages that notice every wrong byte, and bytes of our own making."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, write_block
from pddbridge.kv_handshake import hello
from pddbridge.kv_layout import head_major
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import FrameHeader, encode_frame_header, frame_of, payload_view
from pddbridge.link_schedule import LinkRules
from pddbridge.links import tcp_io
from pddbridge.links.tcp import Handshake, KVSender, KVServer, OutgoingTransfer, SenderSettings, TransferFailed, TransferReport
from tests.support.cutting_proxy import CuttingProxy, Fault
from tests.support.kv import blocks_of, canary_pool, fill_slowly, random_planes, same_pools

SPEC = KVSpec.gqa(4, 3, 8, "bfloat16")
SENDER = Handshake(1, "f1", SPEC, 11, "prefill-1")
RECEIVER = replace(SENDER, epoch=22, name="main-1")
FAST = SenderSettings(num_connections=2, stall_timeout_s=20.0, backoff_s=0.01)
ONE = replace(FAST, num_connections=1)
NUM_TOKENS = 100


async def place_nowhere(_: int, block: KVBlock) -> None:
    assert block.values.size


@dataclass
class Target:
    """A receiving process: server, pool, what it was told."""

    server: KVServer
    port: int
    pool: KVPool
    table: np.ndarray
    completed: dict[int, TransferReport] = field(default_factory=dict)
    failed: dict[int, TransferFailed] = field(default_factory=dict)
    may_place: asyncio.Event = field(default_factory=asyncio.Event)
    num_placing: int = 0
    num_placed: int = 0
    place_error: Exception | None = None
    placed_ids: list[int] = field(default_factory=list)

    async def place(self, transfer_id: int, block: KVBlock) -> None:
        self.num_placing += 1
        try:
            await self.may_place.wait()
            if self.place_error is not None:
                raise self.place_error
            write_block(self.pool, self.table, block)
            self.num_placed += 1
            self.placed_ids.append(transfer_id)
        finally:
            self.num_placing -= 1


@asynccontextmanager
async def receiving(handshake: Handshake = RECEIVER, **options: object) -> AsyncIterator[Target]:
    pool = canary_pool(head_major(12, SPEC.dtype), SPEC, 12)
    target: Target

    async def place(transfer_id: int, block: KVBlock) -> None:
        await target.place(transfer_id, block)

    server = KVServer(
        handshake,
        place,
        lambda transfer_id, report: target.completed.update({transfer_id: report}),
        lambda transfer_id, failure: target.failed.update({transfer_id: failure}),
        **options,  # type: ignore[arg-type]
    )
    target = Target(server, await server.start("127.0.0.1", 0), pool, np.random.default_rng(1).permutation(12))
    target.may_place.set()
    try:
        yield target
    finally:
        target.may_place.set()
        await server.close()


@asynccontextmanager
async def sending(
    settings: SenderSettings = FAST, handshake: Handshake = SENDER, links: Mapping[str, LinkRules] | None = None
) -> AsyncIterator[KVSender]:
    sender = KVSender(handshake, settings, links)
    try:
        yield sender
    finally:
        await sender.close()


@asynccontextmanager
async def between(target: Target, *faults: Fault) -> AsyncIterator[tuple[CuttingProxy, int]]:
    proxy = CuttingProxy(target.port, list(faults))
    port = await proxy.start()
    try:
        yield proxy, port
    finally:
        await proxy.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until ``condition`` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


PLANES = random_planes(SPEC, NUM_TOKENS, seed=3)
TOKENS = TokenRange(5, NUM_TOKENS)


def push_in_chunks(transfer: OutgoingTransfer, tokens: TokenRange = TOKENS, chunk: int = 16) -> None:
    for start in range(tokens.start, tokens.stop, chunk):
        for block in blocks_of(SPEC, PLANES, TokenRange(start, min(start + chunk, tokens.stop))):
            transfer.push(block)


def assert_exact(target: Target, tokens: TokenRange = TOKENS) -> None:
    """``tokens`` are there bit by bit and nothing else was touched."""
    expected = canary_pool(target.pool.layout, SPEC, target.pool.num_pages)
    fill_slowly(expected, target.table, PLANES, LayerRange(0, 4), tokens, HeadRange(0, 3))
    assert same_pools(target.pool, expected)


async def raw_connection(port: int, handshake: Handshake = SENDER) -> socket.socket:
    """A connection with the handshake done, for bytes of our own making."""
    sock = await tcp_io.connect("127.0.0.1", port)
    await tcp_io.send(sock, hello(handshake, 22), memoryview(b""))
    await tcp_io.receive_message(sock, ("welcome",))
    return sock


def frame(transfer_id: int, epoch: int, tokens: TokenRange, sequence: int = 0) -> tuple[FrameHeader, bytes]:
    block = next(blocks_of(SPEC, PLANES, tokens))
    return frame_of(SPEC, transfer_id, epoch, sequence, block), bytes(payload_view(block.values))


async def send_raw(sock: socket.socket, header: FrameHeader, payload: bytes) -> int:
    """Returns the nack's reason, 0 for an ack."""
    await tcp_io.send(sock, encode_frame_header(header), memoryview(payload))
    reply = await tcp_io.receive(sock, 40)
    return int.from_bytes(reply[32:36], "little")
