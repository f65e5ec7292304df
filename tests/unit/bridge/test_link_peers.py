"""Case 112: a receiver takes KV from the workers that its topology names and from nobody else, over whatever link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pddbridge.kv_handshake import HandshakeError, check_hello, decode_body, decode_message_header, hello
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.tcp import Handshake, TransferFailed
from tests.support.tcp_link import FAST, RECEIVER, SENDER, TOKENS, assert_exact, eventually, push_in_chunks, receiving, sending

KNOWN = ("prefill-1", "relay-1")
STRANGER = replace(SENDER, name="prefill-9")


def body_of(mine: Handshake) -> dict[str, str]:
    message = hello(mine, RECEIVER.epoch)
    _, body_bytes, crc = decode_message_header(message[:20], ("hello",))
    return decode_body(message[20 : 20 + body_bytes], crc)


def test_the_name_is_looked_at_last_and_named_with_those_that_are_known() -> None:
    assert check_hello(body_of(SENDER), RECEIVER, KNOWN).name == "prefill-1"
    assert check_hello(body_of(STRANGER), RECEIVER).name == "prefill-9"
    with pytest.raises(HandshakeError, match=r"name differs: sender 'prefill-9'.*'main-1'.*prefill-1.*relay-1"):
        check_hello(body_of(STRANGER), RECEIVER, KNOWN)
    with pytest.raises(HandshakeError, match="fingerprint"):
        check_hello(body_of(replace(STRANGER, fingerprint="f2")), RECEIVER, KNOWN)
    with pytest.raises(HandshakeError, match="name"):
        check_hello(body_of(SENDER), RECEIVER, ())


async def test_a_stranger_s_handshake_over_tcp_is_refused_and_counted() -> None:
    async with receiving(RECEIVER, peers=KNOWN) as target, sending(FAST, STRANGER) as stranger, sending(FAST) as sender:
        target.server.expect(1, TOKENS)
        refused = stranger.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(refused)
        with pytest.raises(TransferFailed, match="name differs") as caught:
            await refused.done()
        assert caught.value.code == "INVALID_ARGUMENT"
        await eventually(lambda: target.server.counters.handshakes_refused >= 1)
        assert (target.num_placed, target.server.counters.num_open) == (0, 1), "the transfer still awaits its sender"
        served = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(served)
        await served.done()
        assert_exact(target)


async def test_a_stranger_s_handshake_over_shared_memory_is_refused_and_counted() -> None:
    epoch = 0x5EED_0112
    mine = replace(RECEIVER, epoch=epoch)
    async with receiving(mine) as target:
        server = ShmServer(mine, target.server.incoming, peers=KNOWN)
        server.start()
        stranger, sender = ShmSender(STRANGER), ShmSender(SENDER)
        try:
            target.server.expect(1, TOKENS)
            refused = stranger.open("127.0.0.1", target.port, epoch, 1, TOKENS)
            push_in_chunks(refused)
            with pytest.raises(TransferFailed, match="name differs"):
                await refused.done()
            assert server.counters.handshakes_refused >= 1
            assert target.num_placed == 0
            served = sender.open("127.0.0.1", target.port, epoch, 1, TOKENS)
            push_in_chunks(served)
            await served.done()
            assert_exact(target)
        finally:
            await stranger.close()
            await sender.close()
            await server.close()
