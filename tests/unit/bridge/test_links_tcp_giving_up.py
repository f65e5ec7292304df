"""Over TCP: when a transfer fails, and when it must not."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

import pytest

from pddbridge.kv_spec import TokenRange
from pddbridge.links.tcp import TransferFailed
from tests.support.cutting_proxy import Fault
from tests.support.tcp_link import (
    FAST,
    ONE,
    TOKENS,
    assert_exact,
    between,
    eventually,
    push_in_chunks,
    receiving,
    sending,
)


@pytest.mark.parametrize("at", [0, 3000])
async def test_a_stalled_link_fails_the_transfer_within_its_deadline(at: int) -> None:
    settings = replace(ONE, stall_timeout_s=0.3)
    async with receiving() as target, sending(settings) as sender, between(target, Fault("stall", at)) as (_, port):
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        started = time.monotonic()
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "DEADLINE_EXCEEDED"
        assert 0.25 < time.monotonic() - started < 2.0
        await target.server.fence(1)
        assert target.server.counters.num_open == 0


async def test_a_transfer_that_owes_nothing_may_be_idle() -> None:
    """Prefill computes for longer than the stall timeout between two pushes."""
    async with receiving() as target, sending(replace(ONE, stall_timeout_s=0.1)) as sender:
        target.server.expect(1, TokenRange(0, 8))
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TokenRange(0, 8))
        push_in_chunks(transfer, TokenRange(0, 4))
        await eventually(lambda: target.num_placed == 2)
        await asyncio.sleep(0.25)
        push_in_chunks(transfer, TokenRange(4, 8))
        await transfer.done()
        assert_exact(target, TokenRange(0, 8))


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with sending(replace(FAST, max_attempts=3)) as sender:
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed, match="3 times in a row") as caught:
            await transfer.done()
        assert caught.value.code == "UNAVAILABLE"


async def test_a_link_that_always_breaks_is_given_up() -> None:
    faults = [Fault("cut", 2000)] * 50
    async with receiving() as target, sending(replace(ONE, max_attempts=3)) as sender, between(target, *faults) as (proxy, port):
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "UNAVAILABLE"
        assert proxy.num_connections == 3


async def test_failures_before_a_transfer_are_not_held_against_it() -> None:
    """Found by chaos: after an outage that outlasted other requests, the first break failed the next one's transfer."""
    settings = replace(ONE, max_attempts=2, backoff_s=0.05)
    async with receiving() as target, between(target, Fault("cut", 0), Fault("cut", 0)) as (proxy, port), sending(settings) as sender:
        target.server.expect(1, TOKENS)
        target.server.expect(2, TOKENS)
        first = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(first)
        await eventually(lambda: proxy.num_connections == 1)
        await asyncio.sleep(0.02)  # the break has been seen, and the next try is due in a while
        first.cancel()
        second = sender.open("127.0.0.1", port, 22, 2, TOKENS)
        push_in_chunks(second)
        await second.done()
        assert proxy.num_connections == 3
        assert_exact(target)


async def test_cancelling_stops_sending_and_tells_the_owner() -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.may_place.clear()
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer, chunk=1)
        await eventually(lambda: target.num_placing == 16)
        await asyncio.sleep(0.05)
        assert target.num_placing == 16  # the connection is not read on while as many wait to be placed
        transfer.cancel()
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == "CANCELLED"
        assert sender.counters.num_open == 0
        target.may_place.set()
        await target.server.fence(1)
        target.server.expect(2, TokenRange(0, 4))
        other = sender.open("127.0.0.1", target.port, 22, 2, TokenRange(0, 4))
        push_in_chunks(other, TokenRange(0, 4))
        await other.done()
