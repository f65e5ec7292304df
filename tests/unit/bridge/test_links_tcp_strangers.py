"""Over TCP: whom the link refuses, epochs, restarts, and strangers on the port."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest

from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.kv_wire import encode_frame_header
from pddbridge.links import tcp_io
from pddbridge.links.tcp import Handshake, KVServer, TransferFailed
from tests.support.kv import blocks_of, random_planes
from tests.support.tcp_link import (
    FAST,
    RECEIVER,
    SENDER,
    SPEC,
    TOKENS,
    assert_exact,
    eventually,
    frame,
    place_nowhere,
    push_in_chunks,
    receiving,
    sending,
)


@pytest.mark.parametrize(
    ("mine", "field", "values", "code"),
    [
        (replace(SENDER, fingerprint="another"), "fingerprint", ("another", "f1"), "INVALID_ARGUMENT"),
        (replace(SENDER, kv_spec=KVSpec.gqa(4, 3, 8, "float16")), "kv_spec", ("float16", "bfloat16"), "INVALID_ARGUMENT"),
        (replace(SENDER, protocol_version=2), "protocol_version", ("2", "1"), "INVALID_ARGUMENT"),
        (replace(SENDER, wire_layout="tokens,layers,heads,dim;1"), "wire_layout", ("tokens,layers", "layers,tokens"), "INVALID_ARGUMENT"),
    ],
)
async def test_a_mismatch_is_refused_on_both_sides_with_both_values(
    mine: Handshake, field: str, values: tuple[str, str], code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving() as target, sending(FAST, mine) as sender:
        target.server.expect(1, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TokenRange(0, 4))
        planes = random_planes(mine.kv_spec, 4, seed=1)
        for block in blocks_of(mine.kv_spec, planes, TokenRange(0, 4)):
            transfer.push(block)
        with pytest.raises(TransferFailed) as caught:
            await transfer.done()
        assert caught.value.code == code
        await eventually(lambda: target.server.counters.handshakes_refused >= 1)
        for text in (caught.value.message, next(r.getMessage() for r in caplog.records if "kv server" in r.getMessage())):
            assert field in text
            assert all(value in text for value in values)
        assert target.num_placed == 0


async def test_another_epoch_is_refused_and_the_right_one_served_afterwards() -> None:
    async with receiving() as target, sending() as sender:
        target.server.expect(1, TokenRange(0, 4))
        old = sender.open("127.0.0.1", target.port, 21, 1, TokenRange(0, 4))
        push_in_chunks(old, TokenRange(0, 4))
        with pytest.raises(TransferFailed, match=r"receiver_epoch differs.*21.*22") as caught:
            await old.done()
        assert caught.value.code == "UNAVAILABLE"
        new = sender.open("127.0.0.1", target.port, 22, 1, TokenRange(0, 4))
        push_in_chunks(new, TokenRange(0, 4))
        await new.done()
        assert_exact(target, TokenRange(0, 4))


async def test_a_restarted_receiver_is_reached_under_its_new_epoch() -> None:
    """Same host and port, new epoch: what was in flight fails, what comes next succeeds, the sender lives on."""
    async with sending() as sender:
        async with receiving() as first:
            port = first.port
            first.server.expect(1, TOKENS)
            broken = sender.open("127.0.0.1", port, 22, 1, TOKENS)
            push_in_chunks(broken, TokenRange(5, 21))
            await eventually(lambda: first.num_placed == 2)
        second = KVServer(replace(RECEIVER, epoch=23), place_nowhere, lambda *_: None, lambda *_: None)
        await second.start("127.0.0.1", port)
        try:
            push_in_chunks(broken, TokenRange(21, 37))
            with pytest.raises(TransferFailed, match="receiver_epoch") as caught:
                await broken.done()
            assert caught.value.code == "UNAVAILABLE"
            second.expect(1, TOKENS)
            again = sender.open("127.0.0.1", port, 23, 1, TOKENS)
            push_in_chunks(again)
            assert (await again.done()).bytes == len(TOKENS) * SPEC.bytes_per_token
        finally:
            await second.close()


BAD_OPENINGS: dict[str, bytes] = {
    "pickle": pickle.dumps({"exec": "x" * 100}),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a frame before the hello": encode_frame_header(frame(1, 22, TokenRange(0, 4))[0]),
    "zeros": bytes(200),
    "nothing": b"",
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
async def test_strangers_are_cut_off_and_friends_still_served(name: str) -> None:
    async with receiving(handshake_timeout_s=0.2) as target, sending() as sender:
        sock = await tcp_io.connect("127.0.0.1", target.port)
        await tcp_io.send(sock, BAD_OPENINGS[name], memoryview(b""))
        with pytest.raises(OSError, match=r"closed|reset"):
            await asyncio.wait_for(tcp_io.receive(sock, 1), 5)
        sock.close()
        target.server.expect(1, TokenRange(0, 4))
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TokenRange(0, 4))
        push_in_chunks(transfer, TokenRange(0, 4))
        await transfer.done()


async def test_it_listens_on_the_given_host_only() -> None:
    async with receiving() as target:
        with pytest.raises(ConnectionRefusedError):
            (await tcp_io.connect("127.0.0.2", target.port)).close()
