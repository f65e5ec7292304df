"""Every fault of the emulated link over real sockets: what each end sees, and that the rest of the link does not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from pydantic import ValidationError

from pdd.config import EmulatedLink, LaunchConfig
from pdd.faults import Fault, LinkOrder, RandomFaults
from pdd.launch.link_emulator import LinkEmulator, ProxyPort
from pdd.topology import Address

DATA = random.Random(4).randbytes(300_000)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Far:
    """The far end: keeps what it got, and how each connection ended."""

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        self.ends: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.got)
        self.got.append(bytearray())
        self.ends.append("")
        self.writers.append(writer)
        try:
            while data := await reader.read(65536):
                self.got[number] += data
            self.ends[number] = "eof"
        except ConnectionError:
            self.ends[number] = "reset"


@asynccontextmanager
async def faulty(*faults: Fault, rtt_ms: float = 0.0) -> AsyncIterator[tuple[Far, Address, LinkEmulator]]:
    far, emulator = Far(), LinkEmulator()
    server = await asyncio.start_server(far.handle, "127.0.0.1", 0)
    target = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    link = EmulatedLink(rate_mbit_s=5000.0, rtt_ms=rtt_ms, faults=faults)
    address = await emulator.add(ProxyPort("a", "b", Address("127.0.0.1", 0), target), link)
    try:
        yield far, address, emulator
    finally:
        await emulator.close()
        for writer in far.writers:
            writer.transport.abort()
        server.close()


async def connect(address: Address) -> Streams:
    return await asyncio.open_connection(address.host, address.port)


async def until(condition, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def how_it_ended(reader: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(5):
            while await reader.read(65536):
                pass
    except ConnectionError:
        return "reset"
    return "eof"


@pytest.mark.parametrize("at", [0, 1, 8192, 100_001])
async def test_a_cut_ends_both_streams_after_exactly_the_bytes_before_it(at: int) -> None:
    async with faulty(Fault(kind="cut", after_bytes=at), rtt_ms=4) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(DATA)
        # What is written on after the cut is answered with a reset, which may come before the end of the stream is read.
        assert await how_it_ended(reader) in ("eof", "reset")
        await until(lambda: far.ends != [] and far.ends[0] != "")
        assert bytes(far.got[0]) == DATA[:at]
        assert far.ends[0] == "eof"
        writer.close()


async def test_a_cut_between_messages_is_an_orderly_end_at_both_ends() -> None:
    async with faulty(Fault(kind="cut", after_bytes=5)) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(b"hello")
        assert await how_it_ended(reader) == "eof"
        await until(lambda: far.ends == ["eof"])
        assert bytes(far.got[0]) == b"hello"
        writer.close()


async def test_a_reset_shows_as_one_at_both_ends() -> None:
    async with faulty(Fault(kind="reset", after_bytes=70_000), rtt_ms=4) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(DATA)
        assert await how_it_ended(reader) == "reset"
        await until(lambda: far.ends == ["reset"])
        assert DATA.startswith(bytes(far.got[0]))
        assert len(far.got[0]) <= 70_000
        writer.close()


@pytest.mark.parametrize("at", [0, 8191, 123_456])
async def test_a_flip_inverts_one_bit_and_nothing_else(at: int) -> None:
    async with faulty(Fault(kind="flip", after_bytes=at, direction="there")) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(DATA)
        writer.write_eof()
        await until(lambda: far.ends == ["eof"])
        assert bytes(far.got[0]) == DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]
        far.writers[0].write(DATA[:1000])
        far.writers[0].close()
        assert await reader.read() == DATA[:1000]
        writer.close()


async def test_a_stall_delays_its_direction_and_loses_nothing() -> None:
    async with faulty(Fault(kind="stall", after_bytes=50_000, direction="there", duration_s=0.3)) as (far, address, _):
        reader, writer = await connect(address)
        started = time.monotonic()
        writer.write(DATA)
        writer.write_eof()
        await until(lambda: far.got != [] and len(far.got[0]) == 50_000)
        far.writers[0].write(b"back")
        assert await reader.readexactly(4) == b"back"
        assert len(far.got[0]) == 50_000, "it stands while the other direction goes on"
        assert time.monotonic() - started < 0.3
        await until(lambda: far.ends == ["eof"])
        assert time.monotonic() - started >= 0.3
        assert bytes(far.got[0]) == DATA
        writer.close()


async def test_overlapping_stalls_last_until_the_last_ends() -> None:
    long = Fault(kind="stall", after_bytes=10, direction="there", duration_s=0.3)
    short = Fault(kind="stall", after_bytes=10, direction="there", duration_s=0.05)
    async with faulty(long, short) as (far, address, _):
        _, writer = await connect(address)
        started = time.monotonic()
        writer.write(DATA)
        await until(lambda: far.got != [] and len(far.got[0]) == len(DATA))
        assert time.monotonic() - started >= 0.3
        writer.close()


async def test_a_stall_without_an_end_holds_the_close_too() -> None:
    async with faulty(Fault(kind="stall", after_bytes=10)) as (far, address, _):
        _, writer = await connect(address)
        writer.write(DATA[:100])
        writer.close()
        await until(lambda: far.got != [] and len(far.got[0]) == 10)
        await asyncio.sleep(0.1)
        assert (len(far.got[0]), far.ends[0]) == (10, "")


async def test_a_half_close_ends_one_direction_only() -> None:
    async with faulty(Fault(kind="half_close", after_bytes=60_000, direction="there")) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(DATA)
        await until(lambda: far.ends == ["eof"])
        assert bytes(far.got[0]) == DATA[:60_000]
        far.writers[0].write(DATA)
        assert await asyncio.wait_for(reader.readexactly(len(DATA)), 5) == DATA
        writer.close()


async def test_a_black_hole_swallows_bytes_and_closes_silently() -> None:
    async with faulty(Fault(kind="black_hole", after_bytes=40_000)) as (far, address, _):
        reader, writer = await connect(address)
        for _ in range(20):  # far more than any buffer on the way: it must not push back
            writer.write(DATA)
            async with asyncio.timeout(5):
                await writer.drain()
        far.writers[0].write(b"anybody there?")
        writer.transport.abort()
        await asyncio.sleep(0.1)
        assert bytes(far.got[0]) == DATA[:40_000]
        assert far.ends[0] == "", "not even a reset gets through"
        assert not reader._buffer  # type: ignore[attr-defined]


async def test_a_black_hole_that_ends_resets_for_its_stream_has_a_hole() -> None:
    async with faulty(Fault(kind="black_hole", after_bytes=40_000, duration_s=0.15)) as (far, address, _):
        reader, writer = await connect(address)
        started = time.monotonic()
        writer.write(DATA)
        assert await how_it_ended(reader) == "reset"
        assert time.monotonic() - started >= 0.15
        await until(lambda: far.ends == ["reset"])
        assert bytes(far.got[0]) == DATA[:40_000]
        writer.close()


async def test_an_idle_flow_is_dropped_silently_and_a_busy_one_is_not() -> None:
    async with faulty(Fault(kind="black_hole", after_idle_s=0.2, connections=(0,))) as (far, address, _):
        _, writer = await connect(address)
        for count in range(1, 8):
            writer.write(b"x")
            await until(lambda count=count: far.got != [] and len(far.got[0]) == count)
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        writer.write(b"y")
        await writer.drain()
        _, other = await connect(address)
        other.write(b"z")
        await until(lambda: len(far.got) == 2 and bytes(far.got[1]) == b"z")
        assert bytes(far.got[0]) == b"x" * 7
        assert far.ends == ["", ""]
        writer.close()
        other.close()


async def test_bytes_back_are_counted_where_the_script_says_so() -> None:
    async with faulty(Fault(kind="cut", after_bytes=1000, counting="back")) as (far, address, _):
        reader, writer = await connect(address)
        writer.write(DATA)
        await until(lambda: far.got != [] and len(far.got[0]) == len(DATA))
        far.writers[0].write(DATA)
        assert await asyncio.wait_for(reader.read(), 5) == DATA[:1000]
        writer.close()


async def test_only_the_named_connections_and_ports_suffer() -> None:
    others = Fault(kind="cut", after_bytes=0, port="control")
    async with faulty(Fault(kind="cut", after_bytes=10, connections=(1,)), others) as (far, address, _):
        sizes = []
        for number in range(3):
            _, writer = await connect(address)
            writer.write(DATA[:500])
            writer.write_eof()
            await until(lambda number=number: len(far.ends) > number and far.ends[number] != "")
            sizes.append(len(far.got[number]))
            writer.close()
        assert sizes == [500, 10, 500]


async def test_a_fault_after_a_time_needs_no_bytes() -> None:
    async with faulty(Fault(kind="reset", after_s=0.1)) as (far, address, _):
        reader, writer = await connect(address)
        started = time.monotonic()
        assert await how_it_ended(reader) == "reset"
        assert time.monotonic() - started >= 0.09
        await until(lambda: far.ends == ["reset"])
        writer.close()


async def test_an_outage_of_the_link_hits_old_and_new_connections_and_passes() -> None:
    async with faulty(Fault(kind="stall", at_s=0.1, duration_s=0.4)) as (far, address, _):
        _, old = await connect(address)
        old.write(b"before")
        await until(lambda: far.got != [] and bytes(far.got[0]) == b"before")
        await asyncio.sleep(0.15)
        _, new = await connect(address)
        old.write(b"old")
        new.write(b"new")
        await asyncio.sleep(0.1)
        assert [bytes(got) for got in far.got] in ([b"before"], [b"before", b""])
        await until(lambda: [bytes(got) for got in far.got] == [b"beforeold", b"new"])
        old.close()
        new.close()


async def test_a_test_may_strike_at_its_own_moment() -> None:
    async with faulty() as (far, address, emulator):
        reader, writer = await connect(address)
        writer.write(b"x")
        await until(lambda: far.got != [] and bytes(far.got[0]) == b"x")
        emulator.strike(Fault(kind="reset", at_s=0))
        assert await how_it_ended(reader) == "reset"
        _, again = await connect(address)
        again.write(b"y")
        await until(lambda: len(far.got) == 2 and bytes(far.got[1]) == b"y")
        writer.close()
        again.close()


async def test_nothing_is_left_when_the_emulator_closes() -> None:
    before = asyncio.all_tasks()
    async with faulty(Fault(kind="stall", after_bytes=1), Fault(kind="black_hole", after_idle_s=60)) as (far, address, _):
        _, writer = await connect(address)
        writer.write(DATA)
        await until(lambda: far.got != [] and len(far.got[0]) == 1)
        writer.transport.abort()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_running_emulator_does_as_it_is_told() -> None:
    async with faulty() as (far, address, emulator):
        reader, writer = await connect(address)
        emulator.obey(b'{"rate_mbit_s": 0.1}')
        begun_s = time.monotonic()
        writer.write(DATA[:5000])
        await until(lambda: far.got != [] and len(far.got[0]) == 5000)
        assert time.monotonic() - begun_s > 0.3, "5,000 bytes take 0.4 s at 0.1 Mbit/s"
        emulator.obey(b'{"rate_mbit_s": null}')
        writer.write(DATA[5000:])
        await until(lambda: bytes(far.got[0]) == DATA)
        emulator.obey(b"no order")
        emulator.obey(LinkOrder(fault=Fault(kind="reset", at_s=0)).model_dump_json().encode())
        with pytest.raises(ConnectionError):
            await reader.readexactly(1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kind": "cut"}, "exactly one of after_bytes"),
        ({"kind": "cut", "after_bytes": 1, "after_s": 1}, "given after_bytes, after_s"),
        ({"kind": "flip", "after_bytes": 1, "duration_s": 1}, "only stall and black_hole last"),
        ({"kind": "stall", "at_s": 1, "connections": [0]}, "all connections"),
        ({"kind": "explode", "after_bytes": 1}, "half_close"),
    ],
)
def test_a_script_that_makes_no_sense_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Fault.model_validate(fields)


def test_a_seed_decides_everything_and_reaches_every_kind() -> None:
    scripts = [RandomFaults(seed=seed, within_bytes=5000).draw() for seed in range(30)]
    assert scripts[3] == RandomFaults(seed=3, within_bytes=5000).draw()
    assert len(set(scripts)) == 30
    faults = [fault for script in scripts for fault in script]
    assert {fault.kind for fault in faults} == {"stall", "cut", "half_close", "reset", "flip", "black_hole"}
    assert all(fault.after_bytes is not None and fault.after_bytes < 5000 for fault in faults)
    assert all((fault.duration_s is not None) == (fault.kind in ("stall", "black_hole")) for fault in faults)
    assert all([fault.connections for fault in script] == [(i,) for i in range(8)] for script in scripts)


def test_a_launch_config_survives_being_written_with_its_faults() -> None:
    """The launcher hands the config to the emulator's process as a file."""
    worker = {"site": "b", "engine": "jax", "page_size": 16, "num_pages": 64, "max_context_tokens": 256}
    link = {"rate_mbit_s": 100, "faults": [{"kind": "cut", "after_bytes": 9}], "random_faults": {"seed": 3}}
    config = LaunchConfig.model_validate(
        {
            "model": "m",
            "sites": ["a", "b"],
            "links": [{"between": ["a", "b"], "emulate": link}],
            "workers": [{"name": "p", "role": "prefill", **worker}, {"name": "m", "role": "main", **worker}],
            "serving": {"site": "a"},
        }
    )
    again = LaunchConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    emulate = again.links[0].emulate
    assert emulate is not None
    assert emulate.faults == (Fault(kind="cut", after_bytes=9),)
