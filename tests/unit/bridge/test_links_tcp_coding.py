"""Payloads are coded and decoded by other threads: the event loop runs on, and order, cancelling and fencing hold meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pddbridge.codecs import CODECS, CodecId, SizeBounds
from pddbridge.codecs_planes import ZSTD_PLANES
from pddbridge.kv_spec import TokenRange
from pddbridge.link_schedule import LinkRules
from pddbridge.links.tcp import OutgoingTransfer, TransferFailed
from tests.support.kv import blocks_of, canary_pool, same_pools
from tests.support.tcp_link import (
    FAST,
    ONE,
    PLANES,
    RECEIVER,
    SPEC,
    TOKENS,
    assert_exact,
    between,
    eventually,
    push_in_chunks,
    receiving,
    sending,
)

ZSTD = CodecId.ZSTD_PLANES
# What compresses; the planes of these tests are random bits.
ZEROS = {name: np.zeros_like(values) for name, values in PLANES.items()}


@dataclass
class GatedCodec:
    """ZSTD_PLANES, that notes its thread and waits at a gate."""

    codec_id: CodecId = ZSTD
    lossless: bool = True
    may_encode: threading.Event = field(default_factory=threading.Event)
    may_decode: threading.Event = field(default_factory=threading.Event)
    encoding: list[threading.Thread] = field(default_factory=list)
    decoding: list[threading.Thread] = field(default_factory=list)

    def takes(self, dtype: np.dtype[np.generic]) -> bool:
        return ZSTD_PLANES.takes(dtype)

    def size_bounds(self, shape: Sequence[int], dtype: np.dtype[np.generic]) -> SizeBounds:
        return ZSTD_PLANES.size_bounds(shape, dtype)

    def encode(self, values: np.ndarray) -> bytes | memoryview | None:
        self.encoding.append(threading.current_thread())
        assert self.may_encode.wait(20)
        return ZSTD_PLANES.encode(values)

    def decode_into(self, payload: bytes | bytearray | memoryview, values: np.ndarray) -> None:
        self.decoding.append(threading.current_thread())
        assert self.may_decode.wait(20)
        ZSTD_PLANES.decode_into(payload, values)


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedCodec]:
    gated = GatedCodec()
    monkeypatch.setitem(CODECS, ZSTD, gated)
    yield gated
    gated.may_encode.set()
    gated.may_decode.set()


def push_zeros(transfer: OutgoingTransfer, tokens: TokenRange = TOKENS) -> None:
    for block in blocks_of(SPEC, ZEROS, tokens):
        transfer.push(block)


async def never(condition: Callable[[], bool], turns: int = 200) -> None:
    """While the event loop, which must not be held up, takes so many turns."""
    for _ in range(turns):
        await asyncio.sleep(0)
        assert not condition()


async def test_the_loop_runs_on_and_other_transfers_pass_while_one_is_coded_and_decoded(codec: GatedCodec) -> None:
    async with receiving() as target, sending(FAST) as sender:
        for transfer_id in (1, 2, 3):
            target.server.expect(transfer_id, TOKENS)
        coded = sender.open("127.0.0.1", target.port, 22, 1, TOKENS, codec=ZSTD)
        push_zeros(coded, TokenRange(TOKENS.start, TOKENS.start + 4))
        await eventually(lambda: len(codec.encoding) >= 1)
        # A connection is held up by what it codes; the other one is not.
        raw = sender.open("127.0.0.1", target.port, 22, 2, TOKENS)
        codec.may_encode.set()
        push_in_chunks(raw)
        await eventually(lambda: len(codec.decoding) >= 1)
        await never(lambda: coded.ended)
        push_in_chunks(later := sender.open("127.0.0.1", target.port, 22, 3, TOKENS))
        codec.may_decode.set()
        await asyncio.gather(raw.done(), later.done())
        push_zeros(coded, TokenRange(TOKENS.start + 4, TOKENS.stop))
        report = await coded.done()
        assert report.bytes == len(TOKENS) * SPEC.bytes_per_token > 2 * report.wire_bytes
        assert {1, 2, 3} == set(target.completed)
        assert target.completed[1].wire_bytes == report.wire_bytes
    threads = {*codec.encoding, *codec.decoding}
    assert threading.current_thread() not in threads
    assert len(set(codec.encoding)) <= 2
    assert len(set(codec.decoding)) <= 2


async def test_frames_of_a_connection_are_placed_in_their_order_though_some_are_coded(codec: GatedCodec) -> None:
    codec.may_encode.set()
    codec.may_decode.set()
    async with receiving() as target, sending(ONE, links={"a-b": LinkRules("fair")}) as sender:
        for transfer_id in (1, 2):
            target.server.expect(transfer_id, TOKENS)
        where = ("127.0.0.1", target.port, 22)
        coded, raw = (sender.open(*where, i + 1, TOKENS, codec=c, link="a-b") for i, c in enumerate((ZSTD, CodecId.RAW)))
        for token in range(TOKENS.start, TOKENS.stop):
            push_zeros(coded, TokenRange(token, token + 1))
            push_in_chunks(raw, TokenRange(token, token + 1))
        await asyncio.gather(coded.done(), raw.done())
        # Turn by turn, two frames per token each.
        assert target.placed_ids == [1, 2] * (2 * len(TOKENS))


async def test_a_transfer_that_is_cancelled_while_it_is_coded_sends_nothing(codec: GatedCodec) -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS, codec=ZSTD)
        push_zeros(transfer)
        await eventually(lambda: len(codec.encoding) == 1)
        transfer.cancel()
        codec.may_encode.set()
        await eventually(lambda: 1 in target.failed)
        assert "cancelled" in str(target.failed[1])
        assert (target.num_placed, len(codec.decoding), len(codec.encoding)) == (0, 0, 1)
        # The connection is as good as before.
        target.server.expect(2, TOKENS)
        again = sender.open("127.0.0.1", target.port, 22, 2, TOKENS)
        push_in_chunks(again)
        await again.done()
        assert_exact(target)
        assert sender.counters.connections_opened == 1


async def test_a_transfer_that_is_fenced_while_a_frame_is_decoded_gets_none_of_it(codec: GatedCodec) -> None:
    codec.may_encode.set()
    async with receiving() as target, sending(ONE) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS, codec=ZSTD)
        push_zeros(transfer)
        await eventually(lambda: len(codec.decoding) == 1)
        async with asyncio.timeout(5):
            await target.server.fence(1)  # nobody writes pages, so there is nothing to wait for
        codec.may_decode.set()
        with pytest.raises(TransferFailed, match="fenced"):
            await transfer.done()
        assert target.num_placed == 0
        assert target.server.counters.late_frames_dropped >= 1
        assert same_pools(target.pool, canary_pool(target.pool.layout, SPEC, target.pool.num_pages))


async def test_a_frame_that_was_being_coded_when_its_connection_broke_is_sent_again(codec: GatedCodec) -> None:
    async with receiving() as target, between(target) as (proxy, port), sending(ONE) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", port, 22, 1, TOKENS, codec=ZSTD)
        push_in_chunks(transfer)
        await eventually(lambda: len(codec.encoding) == 1)
        proxy.drop_all()
        await eventually(lambda: proxy.num_connections >= 2)
        codec.may_encode.set()
        codec.may_decode.set()
        await transfer.done()
        assert_exact(target)


@pytest.mark.parametrize("side", ["sender", "receiver"])
async def test_an_end_closes_while_its_threads_code(codec: GatedCodec, side: str) -> None:
    async with receiving() as target, sending(ONE) as sender:
        target.server.expect(1, TOKENS)
        push_zeros(sender.open("127.0.0.1", target.port, 22, 1, TOKENS, codec=ZSTD))
        if side == "receiver":
            codec.may_encode.set()
        await eventually(lambda: bool(codec.encoding if side == "sender" else codec.decoding))
        async with asyncio.timeout(5):
            await (sender.close() if side == "sender" else target.server.close())
        assert target.num_placed == 0


async def test_a_receiver_that_takes_raw_only_gets_raw_instead_of_a_lossless_codec() -> None:
    async with receiving(RECEIVER, codecs=()) as target, sending(replace(ONE, codec=ZSTD)) as sender:
        target.server.expect(1, TOKENS)
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        report = await transfer.done()
        assert report.wire_bytes == report.bytes
        assert_exact(target)
        assert sender.counters.codecs_declined == 1
