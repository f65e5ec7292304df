"""The NIXL link: what it has of its own. What it shares with shared memory (slots, turns, replies) is tested there."""

from __future__ import annotations

import asyncio
import secrets
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import write_block
from pddbridge.kv_handshake import hello
from pddbridge.kv_layout import head_major
from pddbridge.kv_notes import Note
from pddbridge.kv_pool import KVPool
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import Kind, WireError
from pddbridge.links import tcp_io
from pddbridge.links.nixl import NixlAgent, NixlError, NixlSender, NixlServer, SlotSettings
from pddbridge.links.nixl_grant import Grant, receive_grant, send_grant
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.slots import SLOT_BYTES, note_message
from pddbridge.links.tcp import KVServer, TransferFailed, TransferReport
from tests.support.kv import blocks_of, canary_pool, fill_slowly, same_pools
from tests.support.slot_link_child import LATER_IDS, PLACED_FIRST, PLANES, SENDER, SPEC, TOKENS, TRANSFER_ID

pytest.importorskip("nixl_cu13", reason="the optional extra nixl is not installed")

ROOT = Path(__file__).parents[3]
FEW = SlotSettings(num_slots=3, backoff_s=0.01)


@dataclass
class Target:
    epoch: int
    server: KVServer
    nixl: NixlServer
    agent: NixlAgent
    port: int
    pool: KVPool
    table: np.ndarray
    completed: dict[int, TransferReport] = field(default_factory=dict)
    failed: dict[int, TransferFailed] = field(default_factory=dict)
    may_place: asyncio.Event = field(default_factory=asyncio.Event)
    num_placing: int = 0
    num_placed: int = 0

    async def place(self, transfer_id: int, block: KVBlock) -> None:
        self.num_placing += 1
        await self.may_place.wait()
        write_block(self.pool, self.table, block)
        self.num_placing -= 1
        self.num_placed += 1


@asynccontextmanager
async def an_agent() -> AsyncIterator[NixlAgent]:
    agent = NixlAgent(f"test-{secrets.token_hex(8)}")
    await agent.start()
    try:
        yield agent
    finally:
        await agent.close()


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
    async with an_agent() as agent:
        nixl = NixlServer(handshake, server.incoming, agent, num_slots=4)
        port = await nixl.start("127.0.0.1")
        pool = canary_pool(head_major(12, SPEC.dtype), SPEC, 12)
        target = Target(epoch, server, nixl, agent, port, pool, np.random.default_rng(1).permutation(12))
        target.may_place.set()
        try:
            yield target
        finally:
            target.may_place.set()
            await nixl.close()
            await server.close()


@asynccontextmanager
async def sending(settings: SlotSettings | None = None) -> AsyncIterator[tuple[NixlSender, NixlAgent]]:
    async with an_agent() as agent:
        sender = NixlSender(SENDER, agent, settings)
        try:
            yield sender, agent
        finally:
            await sender.close()


def push_in_chunks(transfer: OutgoingTransfer, tokens: TokenRange = TOKENS, chunk: int = 16) -> None:
    for start in range(tokens.start, tokens.stop, chunk):
        for block in blocks_of(SPEC, PLANES, TokenRange(start, min(start + chunk, tokens.stop))):
            transfer.push(block)


def assert_exact(target: Target, tokens: TokenRange = TOKENS) -> None:
    expected = canary_pool(target.pool.layout, SPEC, target.pool.num_pages)
    fill_slowly(expected, target.table, PLANES, LayerRange(0, 4), tokens, HeadRange(0, 3))
    assert same_pools(target.pool, expected)


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def child(role: str, epoch: int, port: int = 1) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = (sys.executable, "-m", "tests.support.slot_link_child", role, "nixl", str(epoch), str(port))
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def says(process: asyncio.subprocess.Process, word: str) -> list[str]:
    """Waits for a line that starts with ``word`` (NIXL prints there as well); the rest of it."""
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while line := (await process.stdout.readline()).decode().split():
            if line[0] == word:
                return line[1:]
    raise AssertionError(f"the child ended before it said {word!r}")


async def test_a_transfer_is_exact_and_memory_is_given_back() -> None:
    async with receiving() as target, sending() as (sender, agent):
        for transfer_id, tokens in ((1, TOKENS), (2, TokenRange(0, 5))):
            target.server.expect(transfer_id, tokens)
            transfer = sender.open("127.0.0.1", target.port, target.epoch, transfer_id, tokens)
            push_in_chunks(transfer, tokens, chunk=1)
            report = await transfer.done()
            assert target.completed[transfer_id] == report
        assert_exact(target, TokenRange(0, TOKENS.stop))
        assert sender.counters.bytes_sent == target.server.counters.bytes_received == TOKENS.stop * SPEC.bytes_per_token
        assert sender.counters.connections_opened == target.nixl.counters.num_connections == 1
        await sender.close()
        await eventually(lambda: target.nixl.counters.num_connections == 0)
        assert (agent.num_quarantined, target.agent.num_quarantined, sender.works(target.epoch)) == (0, 0, True)


async def test_frames_of_a_slot_fill_whole_slots() -> None:
    spec = KVSpec.gqa(2, 4, 64, "float32")
    tokens = TokenRange(0, 9000)
    planes = {plane.name: np.random.default_rng(5).random((2, 9000, 4, 64), np.float32) for plane in spec.groups[0].planes}
    seen: list[bool] = []

    async def place(_: int, block: KVBlock) -> None:
        want = planes[block.plane][block.layers.start : block.layers.stop, block.tokens.start : block.tokens.stop]
        seen.append(block.values.tobytes() == want.tobytes())

    handshake = replace(SENDER, kv_spec=spec, epoch=secrets.randbits(64))
    server = KVServer(handshake, place, lambda *_: None, lambda *_: None)
    async with an_agent() as ours, an_agent() as theirs:
        nixl, sender = NixlServer(handshake, server.incoming, theirs), NixlSender(replace(SENDER, kv_spec=spec), ours, FEW)
        port = await nixl.start("127.0.0.1")
        server.expect(9, tokens)
        transfer = sender.open("127.0.0.1", port, handshake.epoch, 9, tokens)
        for block in blocks_of(spec, planes, tokens):
            transfer.push(block)
        assert (await transfer.done()).num_frames == len(seen) == 8  # of each layer and plane a whole slot, and what is left
        assert all(seen)
        await sender.close()
        await nixl.close()
        await server.close()


async def test_a_fence_waits_for_writers_and_late_frames_are_dropped() -> None:
    async with receiving() as target, sending(FEW) as (sender, _):
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, target.epoch, 1, TOKENS)
        push_in_chunks(transfer, chunk=1)
        await eventually(lambda: target.num_placing == 3)  # as many as there are slots
        fence = asyncio.create_task(target.server.fence(1))
        await asyncio.sleep(0.02)
        assert not fence.done()
        target.may_place.set()
        await fence
        assert target.num_placed == 3
        before = [arrays[0].tobytes() for arrays in target.pool.arrays]
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        assert [arrays[0].tobytes() for arrays in target.pool.arrays] == before


@pytest.mark.parametrize("field_name", ["fingerprint", "epoch"])
async def test_a_mismatch_is_refused(field_name: str) -> None:
    async with receiving(**({"fingerprint": "f2"} if field_name == "fingerprint" else {})) as target, sending(FEW) as (sender, _):
        epoch = target.epoch ^ (field_name == "epoch")
        transfer = sender.open("127.0.0.1", target.port, epoch, 1, TOKENS)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed, match=f"{field_name} differs") as caught:
            await transfer.done()
        assert caught.value.code == ("INVALID_ARGUMENT" if field_name == "fingerprint" else "UNAVAILABLE")
        assert (target.nixl.counters.handshakes_refused, target.num_placed) == (1, 0)


async def test_a_receiver_killed_half_way_fails_the_transfer() -> None:
    epoch = secrets.randbits(64)
    async with sending(FEW) as (sender, agent), child("receive", epoch) as process:
        (port,) = await says(process, "listening")
        transfer = sender.open("127.0.0.1", int(port), epoch, TRANSFER_ID, TOKENS)
        push_in_chunks(transfer, chunk=1)
        await says(process, "placing")
        process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(TransferFailed) as caught:
                await transfer.done()
        assert caught.value.code == "UNAVAILABLE"
        assert sender.counters.bytes_sent <= PLACED_FIRST * 4 * 3 * 8 * 2
        assert agent.num_quarantined == 0


async def test_a_stopped_receiver_fails_the_transfer_within_its_deadline_and_goes_on_later() -> None:
    epoch = secrets.randbits(64)
    async with sending(replace(FEW, stall_timeout_s=1.0)) as (sender, _), child("receive", epoch) as process:
        (port,) = await says(process, "listening")
        transfer = sender.open("127.0.0.1", int(port), epoch, TRANSFER_ID, TOKENS)
        await eventually(lambda: sender.connected(epoch))
        process.send_signal(signal.SIGSTOP)
        push_in_chunks(transfer, chunk=1)
        async with asyncio.timeout(60):
            with pytest.raises(TransferFailed) as caught:
                await transfer.done()
        assert caught.value.code == "DEADLINE_EXCEEDED"
        process.send_signal(signal.SIGCONT)
        # How many frames of the first are placed depends on whether they or the news of its end come first. Later ones have as long as a
        # busy machine takes.
        sender._settings = replace(sender._settings, stall_timeout_s=100.0)
        placing = asyncio.create_task(says(process, "placing"))
        for transfer_id in LATER_IDS:
            later = sender.open("127.0.0.1", int(port), epoch, transfer_id, TOKENS)
            push_in_chunks(later, chunk=1)
            await eventually(lambda later=later: placing.done() or later.ended)  # type: ignore[misc]
            if placing.done():
                break
        await placing


async def test_a_sender_killed_half_way_leaves_nothing_but_counted_memory() -> None:
    async with receiving() as target:
        target.server.expect(TRANSFER_ID, TOKENS)
        async with child("send", target.epoch, target.port) as process:
            await says(process, "sending")
            target.may_place.clear()
            await eventually(lambda: target.num_placing > 1)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            await eventually(lambda: target.nixl.counters.num_connections == 0)
            fence = asyncio.create_task(target.server.fence(TRANSFER_ID))
            await asyncio.sleep(0.02)
            assert not fence.done()
            target.may_place.set()
            await fence
        assert target.num_placing == target.server.counters.num_open == 0
        assert target.completed == {}
        assert target.agent.num_quarantined <= 1


async def test_what_was_announced_and_never_came_is_quarantined_and_quarantine_is_bounded() -> None:
    async with receiving() as target, sending(FEW) as (sender, _):
        for count in range(1, 9):
            sock = await tcp_io.connect("127.0.0.1", target.port)
            await tcp_io.send(sock, hello(SENDER, target.epoch), memoryview(b""))
            await tcp_io.receive_message(sock, ("welcome",))
            grant = await receive_grant(sock)
            assert grant.num_slots == 4
            await tcp_io.send(sock, note_message(Note(Kind.PING, 0, target.epoch, 2)), memoryview(b""))
            await asyncio.sleep(0.01)
            sock.close()
            await eventually(lambda count=count: target.agent.num_quarantined == count)  # type: ignore[misc]
        with pytest.raises(NixlError, match="quarantined"):
            await target.agent.register(SLOT_BYTES)
        transfer = sender.open("127.0.0.1", target.port, target.epoch, 1, TOKENS)
        with pytest.raises(TransferFailed) as caught:
            await asyncio.wait_for(transfer.done(), 5)
        assert caught.value.code == "UNAVAILABLE"


async def test_a_write_that_nixl_refuses_ends_the_connection_and_is_remembered() -> None:
    async with receiving() as target, sending(FEW) as (sender, agent):
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, target.epoch, 1, TOKENS)
        await eventually(lambda: sender.connected(target.epoch))
        await agent.call(lambda nixl: nixl.remove_remote_agent(target.agent.name))
        push_in_chunks(transfer)
        await transfer.done()  # over a new connection
        assert sender.counters.connections_opened == 2
        assert not sender.works(target.epoch)
        assert_exact(target)


async def test_broken_grants_are_refused() -> None:
    grant = Grant(1 << 40, 8, b"12345678", b"metadata")
    async with asyncio.timeout(10):
        listener = await tcp_io.listen("127.0.0.1", 0)
        for change in ("none", "slots", "metadata", "flip"):
            client = await tcp_io.connect("127.0.0.1", listener.getsockname()[1])
            server, _ = await asyncio.get_running_loop().sock_accept(listener)
            header = struct.pack("<QI8sI", grant.address, 65 if change == "slots" else 8, grant.tag, 2**31 if change == "metadata" else 8)
            if change == "none":
                await send_grant(server, grant)
                assert await receive_grant(client) == grant
            else:
                body = bytearray(header + grant.metadata)
                crc = crc32c(bytes(body))
                body[-1] ^= change == "flip"
                await tcp_io.send(server, bytes(body) + struct.pack("<I", crc), memoryview(b""))
                with pytest.raises(WireError):
                    await receive_grant(client)
            server.close()
            client.close()
        listener.close()
