"""The TCP link when nothing is heard: flows that are dropped silently, idle connections, slow and restarted receivers. Cases 31, 33."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from pddbridge.kv_spec import TokenRange
from pddbridge.links import tcp_io
from pddbridge.links.intake import ConnectionClosedError
from pddbridge.links.tcp import KVServer, Liveness, SenderSettings, TransferFailed
from tests.support.cutting_proxy import Fault
from tests.support.tcp_link import (
    FAST,
    ONE,
    RECEIVER,
    SPEC,
    TOKENS,
    assert_exact,
    between,
    eventually,
    place_nowhere,
    push_in_chunks,
    raw_connection,
    receiving,
    sending,
)

TOTAL_BYTES = len(TOKENS) * SPEC.bytes_per_token
QUICK = Liveness(idle_after_s=0.05, keepalive_s=30.0, probe_timeout_s=0.15, silence_timeout_s=0.6)


@pytest.mark.parametrize("num_connections", [1, 3])
async def test_case_33_a_flow_that_was_dropped_silently_costs_less_than_a_second(num_connections: int) -> None:
    settings = SenderSettings(num_connections=num_connections, liveness=replace(QUICK, probe_timeout_s=0.4))
    async with receiving() as target, sending(settings) as sender, between(target) as (proxy, port):
        for transfer_id in (1, 2):
            target.server.expect(transfer_id, TokenRange(0, 8))
        await_first = sender.open("127.0.0.1", port, 22, 1, TokenRange(0, 8))
        push_in_chunks(await_first, TokenRange(0, 8))
        await await_first.done()
        await eventually(lambda: proxy.num_connections == num_connections)
        proxy.silence_all()
        await asyncio.sleep(0.1)
        started = time.monotonic()
        transfer = sender.open("127.0.0.1", port, 22, 2, TokenRange(0, 8))
        push_in_chunks(transfer, TokenRange(0, 8))
        await transfer.done()
        assert time.monotonic() - started < 1.0
        await eventually(lambda: proxy.num_connections == 2 * num_connections)
        assert_exact(target, TokenRange(0, 8))


async def test_an_idle_connection_is_kept_alive_and_its_death_noticed_before_it_is_needed() -> None:
    settings = replace(ONE, liveness=replace(QUICK, keepalive_s=0.1))
    async with receiving() as target, sending(settings) as sender, between(target) as (proxy, port):
        target.server.expect(1, TOKENS)
        sender.open("127.0.0.1", port, 22, 1, TOKENS)
        await eventually(lambda: sender.stats()[("127.0.0.1", port)].num_connections == 1)
        await asyncio.sleep(0.3)
        assert proxy.num_connections == 1  # pings are answered
        proxy.silence_all()
        await eventually(lambda: proxy.num_connections == 2)  # nothing was sent and nothing waits to be


async def test_a_connection_that_goes_silent_with_frames_in_flight_is_replaced_and_the_transfer_resumed() -> None:
    settings = replace(ONE, liveness=QUICK)
    async with receiving() as target, sending(settings) as sender, between(target, Fault("stall", 4000)) as (proxy, port):
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        started = time.monotonic()
        assert (await transfer.done()).bytes == TOTAL_BYTES
        assert time.monotonic() - started < 5.0
        assert proxy.num_connections == 2
        assert_exact(target)


async def test_a_slow_receiver_is_not_taken_for_a_dead_one() -> None:
    """Placing takes longer than the silence that a dead connection is allowed: the receiver says every second that it lives."""
    settings = replace(ONE, liveness=replace(QUICK, silence_timeout_s=1.4))
    async with receiving() as target, sending(settings) as sender:
        target.may_place.clear()
        target.server.expect(1, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TokenRange(0, 4))
        push_in_chunks(transfer, TokenRange(0, 4))
        await asyncio.sleep(2.3)
        target.may_place.set()
        await transfer.done()
        assert (sender.counters.connections_opened, sender.counters.frames_resent) == (1, 0)


async def test_a_connection_on_which_nothing_comes_any_more_is_closed() -> None:
    async with receiving(idle_timeout_s=1.0) as target:
        sock = await raw_connection(target.port)
        with pytest.raises(ConnectionClosedError):
            await asyncio.wait_for(tcp_io.receive(sock, 1), 5)
        sock.close()
        await eventually(lambda: target.server.counters.num_connections == 0)


async def test_case_31_a_receiver_that_restarted_is_noticed_at_once() -> None:
    """Also by a transfer that has nothing to send at the time; the next one, to the new epoch, succeeds over the same sender."""
    async with sending(replace(FAST, backoff_s=0.05)) as sender:
        async with receiving() as first:
            port = first.port
            first.server.expect(1, TOKENS)
            waiting = sender.open("127.0.0.1", port, 22, 1, TOKENS)
            await eventually(lambda: first.server.counters.num_connections == 2)
        second = KVServer(replace(RECEIVER, epoch=23), place_nowhere, lambda *_: None, lambda *_: None)
        await second.start("127.0.0.1", port)
        try:
            async with asyncio.timeout(1.0):
                with pytest.raises(TransferFailed, match="receiver_epoch") as caught:
                    await waiting.done()
            assert caught.value.code == "UNAVAILABLE"
            second.expect(1, TOKENS)
            again = sender.open("127.0.0.1", port, 23, 1, TOKENS)
            push_in_chunks(again)
            assert (await again.done()).bytes == TOTAL_BYTES
        finally:
            await second.close()
