"""A 1,500-token transfer over TCP completes bit-exact whatever the link does to it, by script and by seed; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace

import numpy as np
import pytest

from pdd.config import EmulatedLink
from pdd.faults import Fault, RandomFaults
from pdd.launch.link_emulator import LinkEmulator, ProxyPort
from pdd.topology import Address
from pddbridge.codecs import CodecId
from pddbridge.engine import KVBlock
from pddbridge.kv_convert import write_block
from pddbridge.kv_layout import head_major
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.links.tcp import Handshake, KVSender, KVServer, Liveness, SenderSettings, TransferFailed
from tests.support.kv import bits, blocks_of, canary_pool, cell, random_planes

SPEC = KVSpec.gqa(4, 3, 16, "bfloat16")
NUM_TOKENS = 1500
TOKENS = TokenRange(3, NUM_TOKENS)
CHUNK = 64
TOTAL_BYTES = SPEC.bytes_per_token * len(TOKENS)
PLANES = random_planes(SPEC, NUM_TOKENS, seed=7)  # K: any bit pattern, which no codec makes smaller; V: normals, which one does
PLANES["v"] = np.random.default_rng(8).standard_normal(PLANES["v"].shape).astype(SPEC.np_dtype)
SENDER = Handshake(1, "f1", SPEC, 11, "prefill-1")
RECEIVER = replace(SENDER, epoch=22, name="main-1")
SETTINGS = SenderSettings(num_connections=2, stall_timeout_s=15.0, backoff_s=0.01)
# Silence is noticed sooner than in earnest, so that the tests are short.
NERVOUS = replace(
    SETTINGS,
    connect_timeout_s=0.6,
    liveness=Liveness(idle_after_s=0.2, keepalive_s=0.3, probe_timeout_s=0.2, silence_timeout_s=0.6),
)


class Receiving:
    """A receiving end whose pages have canaries around them."""

    def __init__(self) -> None:
        self.pool = canary_pool(head_major(12, SPEC.dtype), SPEC, 130)
        self.table = np.random.default_rng(2).permutation(130)[: -(-NUM_TOKENS // 12)]
        self.completed: list[int] = []
        self.failed: list[TransferFailed] = []
        self.server = KVServer(RECEIVER, self._place, lambda i, _: self.completed.append(i), lambda _, why: self.failed.append(why))

    async def _place(self, _: int, block: KVBlock) -> None:
        write_block(self.pool, self.table, block)

    def assert_exact(self, tokens: TokenRange) -> None:
        """``tokens`` are there bit by bit; no other byte of the pool was touched."""
        num_pages, heads, size, dim = self.pool.arrays[0][0].shape
        assert (heads, size, dim) == (3, 12, 16)
        owned = np.zeros((num_pages, size), bool)
        for token in range(tokens.start, tokens.stop):
            owned[self.table[token // 12], token % 12] = True
        where = np.arange(tokens.start, tokens.stop)
        for layer, arrays in enumerate(self.pool.arrays):
            for array, plane in zip(arrays, ("k", "v"), strict=True):
                got = bits(array)[self.table[where // 12], :, where % 12]
                assert np.array_equal(got, bits(PLANES[plane])[layer, where])
                assert (bits(array).transpose(0, 2, 1, 3)[~owned] == 0xA5A5).all()
        assert np.array_equal(bits(cell(self.pool, self.table, 1, 0, where[0], 2)), bits(PLANES["k"])[1, where[0], 2])


@asynccontextmanager
async def over(link: EmulatedLink, settings: SenderSettings = SETTINGS) -> AsyncIterator[tuple[Receiving, KVSender, int, LinkEmulator]]:
    receiving, emulator = Receiving(), LinkEmulator()
    target = Address("127.0.0.1", await receiving.server.start("127.0.0.1", 0))
    near = await emulator.add(ProxyPort("a", "b", Address("127.0.0.1", 0), target), link)
    sender = KVSender(SENDER, settings)
    try:
        yield receiving, sender, near.port, emulator
    finally:
        await sender.close()
        await emulator.close()
        await receiving.server.close()


async def transfer(
    receiving: Receiving, sender: KVSender, port: int, transfer_id: int = 1, tokens: TokenRange = TOKENS, timeout_s: float = 20.0
) -> None:
    """Chunk by chunk, as prefill computes it; exact, complete on both sides, nothing held afterwards."""
    receiving.server.expect(transfer_id, tokens)
    outgoing = sender.open("127.0.0.1", port, 22, transfer_id, tokens)
    for start in range(tokens.start, tokens.stop, CHUNK):
        for block in blocks_of(SPEC, PLANES, TokenRange(start, min(start + CHUNK, tokens.stop))):
            outgoing.push(block)
        await asyncio.sleep(0)
    async with asyncio.timeout(timeout_s):
        report = await outgoing.done()
    assert report.bytes == SPEC.bytes_per_token * len(tokens)
    assert receiving.failed == []
    assert receiving.completed == [*range(1, transfer_id + 1)]
    await receiving.server.fence(transfer_id)
    assert receiving.server.counters.num_open == 0
    assert sender.counters.num_open == 0


HALF = TOTAL_BYTES // 4  # of one of two connections
SCRIPTS: dict[str, tuple[Fault, ...]] = {
    "nothing": (),
    "a stall there": (Fault(kind="stall", after_bytes=HALF, direction="there", duration_s=0.3),),
    "a stall of the replies": (Fault(kind="stall", after_bytes=HALF, direction="back", duration_s=0.3),),
    "a stall before the handshake": (Fault(kind="stall", after_bytes=0, duration_s=0.3),),
    "a cut before the handshake": (Fault(kind="cut", after_bytes=0, connections=(0, 1)),),
    "a cut in the hello": (Fault(kind="cut", after_bytes=100, connections=(0, 1)),),
    "a cut in the welcome": (Fault(kind="cut", after_bytes=100, counting="back", connections=(0, 1)),),
    "cuts in frames": (Fault(kind="cut", after_bytes=HALF, connections=(0, 1, 2)),),
    "a cut in a reply": (Fault(kind="cut", after_bytes=500, counting="back", connections=(0, 1)),),
    "no more bytes to the receiver": (Fault(kind="half_close", after_bytes=HALF, direction="there", connections=(0, 1)),),
    "no more replies": (Fault(kind="half_close", after_bytes=HALF, direction="back", connections=(0, 1)),),
    "resets in frames": (Fault(kind="reset", after_bytes=HALF, connections=(0, 1)),),
    "a reset in the replies": (Fault(kind="reset", after_bytes=500, counting="back", connections=(0, 1)),),
    "a flip in the hello": (Fault(kind="flip", after_bytes=30, direction="there", connections=(0, 1)),),
    "a flip in the welcome": (Fault(kind="flip", after_bytes=30, direction="back", counting="back", connections=(0, 1)),),
    "flips in payloads": tuple(Fault(kind="flip", after_bytes=n, direction="there", connections=(0, 1)) for n in (9000, 50_000, HALF)),
    "a flip in a reply": (Fault(kind="flip", after_bytes=600, direction="back", counting="back", connections=(0, 1)),),
    "an outage of the line": (Fault(kind="stall", at_s=0.02, duration_s=0.4),),
}


@pytest.mark.parametrize("name", ["nothing", "cuts in frames", "resets in frames", "flips in payloads", "no more replies"])
async def test_coded_payloads_are_exact_through(name: str) -> None:
    coded = replace(SETTINGS, codec=CodecId.ZSTD_PLANES)
    async with over(EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, faults=SCRIPTS[name]), coded) as (receiving, sender, port, emulator):
        await transfer(receiving, sender, port)
        receiving.assert_exact(TOKENS)
        if name == "nothing":
            assert emulator.directions["a", "b"].stats().bytes_carried < 0.9 * TOTAL_BYTES


@pytest.mark.parametrize("name", SCRIPTS)
async def test_it_is_exact_through(name: str) -> None:
    async with over(EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, jitter_ms=0.5, faults=SCRIPTS[name])) as (receiving, sender, port, _):
        await transfer(receiving, sender, port)
        receiving.assert_exact(TOKENS)


SILENT: dict[str, tuple[Fault, ...]] = {
    "a black hole there": (Fault(kind="black_hole", after_bytes=HALF, direction="there", connections=(0, 1)),),
    "a black hole for replies": (Fault(kind="black_hole", after_bytes=HALF, direction="back", connections=(0, 1)),),
    "a black hole both ways": (Fault(kind="black_hole", after_bytes=HALF, connections=(0,)),),
    "a stall without an end": (Fault(kind="stall", after_bytes=HALF, connections=(0, 1)),),
    "a black hole from the hello on": (Fault(kind="black_hole", after_bytes=0, connections=(0, 1)),),
}


@pytest.mark.parametrize("name", SILENT)
async def test_it_is_exact_through_silence(name: str) -> None:
    link = EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, faults=SILENT[name])
    async with over(link, NERVOUS) as (receiving, sender, port, _):
        await transfer(receiving, sender, port)
        receiving.assert_exact(TOKENS)


async def test_an_idle_connection_that_was_dropped_silently_costs_little() -> None:
    forgets = Fault(kind="black_hole", after_idle_s=0.2, connections=(0, 1))
    # Keep-alive would prevent it: what is tested is that a connection that was idle is asked before it is relied on.
    late = replace(NERVOUS, liveness=replace(NERVOUS.liveness, keepalive_s=60.0, silence_timeout_s=5.0))
    async with over(EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, faults=(forgets,)), late) as (receiving, sender, port, _):
        await transfer(receiving, sender, port, 1, TokenRange(3, 700))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        await transfer(receiving, sender, port, 2, TokenRange(700, NUM_TOKENS))
        assert time.monotonic() - started < 4.0, "long before the silence of a connection that owes answers would be noticed"
        receiving.assert_exact(TOKENS)


async def latest_until(over: asyncio.Event) -> float:
    """By how many seconds the event loop was late at most until ``over``."""
    latest_s = 0.0
    while not over.is_set():
        began_s = time.monotonic()
        await asyncio.sleep(0.005)
        latest_s = max(latest_s, time.monotonic() - began_s - 0.005)
    return latest_s


async def reconnects_after_idling(slower: int) -> tuple[int, float]:
    """Connections that were opened beyond the first ones, where keep-alive goes every 0.3 s and who is idle for 0.8 s is forgotten; and by
    how much the event loop was late at most. ``slower``: so many times.
    """
    forgets = Fault(kind="black_hole", after_idle_s=slower * 0.8)
    nervous = {field.name: slower * getattr(NERVOUS.liveness, field.name) for field in fields(Liveness)}
    settings = replace(SETTINGS, stall_timeout_s=100.0, connect_timeout_s=30.0, liveness=Liveness(**nervous))
    ended = asyncio.Event()
    async with over(EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, faults=(forgets,)), settings) as (receiving, sender, port, _):
        late = asyncio.create_task(latest_until(ended))
        try:
            await transfer(receiving, sender, port, 1, TokenRange(3, 700), timeout_s=120.0)
            await asyncio.sleep(slower * 1.6)
            await transfer(receiving, sender, port, 2, TokenRange(700, NUM_TOKENS), timeout_s=120.0)
            receiving.assert_exact(TOKENS)
        finally:
            ended.set()
        return sender.counters.connections_opened - SETTINGS.num_connections, await late


async def test_keep_alive_keeps_an_idle_flow_from_being_dropped() -> None:
    """Unless the machine is too busy for it: then all is slower, until it is not."""
    for slower in (1, 3, 10, 40):
        reconnects, late_s = await reconnects_after_idling(slower)
        if late_s < slower * 0.15:
            assert reconnects == 0
            return
    pytest.fail("the event loop was late by seconds every time")


NUM_SEEDS = 40


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, NUM_SEEDS))])
async def test_it_is_exact_through_what_a_seed_draws(seed: int) -> None:
    drawn = RandomFaults(seed=seed, num_connections=6, within_bytes=HALF, longest_s=0.5)
    async with over(EmulatedLink(rate_mbit_s=400.0, rtt_ms=2.0, jitter_ms=1.0, random_faults=drawn)) as (receiving, sender, port, _):
        await transfer(receiving, sender, port)
        receiving.assert_exact(TOKENS)


async def test_faults_leave_no_descriptor_and_no_task() -> None:
    before, tasks = set(os.listdir("/proc/self/fd")), asyncio.all_tasks()
    for name in ("cuts in frames", "resets in frames", "no more replies", "flips in payloads"):
        async with over(EmulatedLink(rate_mbit_s=2000.0, faults=SCRIPTS[name])) as (receiving, sender, port, _):
            await transfer(receiving, sender, port)
    async with asyncio.timeout(5):
        while len(os.listdir("/proc/self/fd")) > len(before) or not asyncio.all_tasks() <= tasks:
            await asyncio.sleep(0.01)
