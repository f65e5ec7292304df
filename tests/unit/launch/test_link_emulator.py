"""The emulated link: rate, round trip, fairness, half-close and refusal, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdd.config import EmulatedLink
from pdd.launch.link_emulator import LinkEmulator, ProxyPort
from pdd.topology import Address


@asynccontextmanager
async def far_server(handle) -> AsyncIterator[Address]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


@asynccontextmanager
async def proxied(handle, link: EmulatedLink) -> AsyncIterator[tuple[Address, LinkEmulator]]:
    emulator = LinkEmulator()
    async with far_server(handle) as target:
        address = await emulator.add(ProxyPort("a", "b", Address("127.0.0.1", 0), target), link)
        try:
            yield address, emulator
        finally:
            await emulator.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    received = 0
    while data := await reader.read(65536):
        received += len(data)
    writer.write(str(received).encode())
    writer.close()


async def test_rate_is_the_configured_one():
    size = 500_000
    async with proxied(sink, EmulatedLink(rate_mbit_s=8.0)) as (address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        started = asyncio.get_running_loop().time()
        writer.write(bytes(size))
        writer.write_eof()
        assert await reader.read() == str(size).encode()
        took = asyncio.get_running_loop().time() - started
    # 500,000 B at 1,000,000 B/s; never faster than the line, and a wide margin above for a busy machine.
    assert 0.49 <= took < 2.0


async def test_round_trip_is_the_configured_one_and_content_survives():
    payload = bytes(range(256)) * 100
    async with proxied(echo, EmulatedLink(rate_mbit_s=1000.0, rtt_ms=80.0, jitter_ms=5.0)) as (address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"x")
        await reader.readexactly(1)
        started = asyncio.get_running_loop().time()
        writer.write(payload)
        assert await reader.readexactly(len(payload)) == payload
        took = asyncio.get_running_loop().time() - started
    assert 0.08 <= took < 0.6


async def test_jitter_never_reorders_a_flow():
    """Jitter far above the time between quanta makes many of them due at the same instant."""
    payload = random.Random(1).randbytes(400_000)
    async with proxied(echo, EmulatedLink(rate_mbit_s=1000.0, rtt_ms=2.0, jitter_ms=20.0)) as (address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(payload)
        assert await reader.readexactly(len(payload)) == payload
        writer.close()


async def test_a_small_message_does_not_wait_for_a_bulk_flow():
    async with proxied(echo, EmulatedLink(rate_mbit_s=16.0)) as (address, _):
        _, bulk = await asyncio.open_connection(address.host, address.port)
        bulk.write(bytes(1_500_000))
        await asyncio.sleep(0.1)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        started = asyncio.get_running_loop().time()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        took = asyncio.get_running_loop().time() - started
        bulk.close()
    # The bulk flow needs 0.75 s of the line; fairness lets a message through after a quantum or two.
    assert took < 0.4


async def test_both_flows_progress_alike():
    counts = [0, 0]

    def counting(index: int):
        async def drain(reader: asyncio.StreamReader) -> None:
            while data := await reader.read(65536):
                counts[index] += len(data)

        return drain

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(2_000_000))
        await writer.drain()
        writer.close()

    async with proxied(pour, EmulatedLink(rate_mbit_s=16.0)) as (address, _):
        pairs = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
        jobs = [asyncio.create_task(counting(i)(reader)) for i, (reader, _) in enumerate(pairs)]
        await asyncio.sleep(0.8)
        for job in jobs:
            job.cancel()
    assert min(counts) > 100_000
    assert min(counts) / max(counts) > 0.7


async def test_end_of_stream_passes_as_half_close():
    async with proxied(sink, EmulatedLink(rate_mbit_s=100.0, rtt_ms=10.0)) as (address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"abc")
        writer.write_eof()
        assert await reader.read() == b"3"


async def test_unreachable_far_end_is_a_closed_connection():
    emulator = LinkEmulator()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    address = await emulator.add(ProxyPort("a", "b", Address("127.0.0.1", 0), Address("127.0.0.1", port)), EmulatedLink(rate_mbit_s=8.0))
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"hello")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    await emulator.close()


async def test_buffering_is_bounded_when_the_far_end_does_not_read():
    async def stuck(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    link = EmulatedLink(rate_mbit_s=800.0)
    async with proxied(stuck, link) as (address, emulator):
        loop = asyncio.get_running_loop()
        sock = socket.create_connection((address.host, address.port))
        sock.setblocking(False)
        sent = 0

        async def push() -> None:
            nonlocal sent
            while True:
                await loop.sock_sendall(sock, bytes(65536))
                sent += 65536

        job = asyncio.create_task(push())
        await asyncio.sleep(0.7)
        first = sent
        await asyncio.sleep(0.4)
        job.cancel()
        sock.close()
        assert sent == first, "the near end is told to wait"
        assert emulator.directions["a", "b"].stats().bytes_carried < 64 * 1024 * 1024
