"""The TCP link under mutual TLS: exact bytes, going on after breaks, and who is refused, by name, on both sides."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from typing import Literal

import pytest

from pddbridge.links import tcp_io, tls_io
from pddbridge.links.tcp import Handshake, SenderSettings, TransferFailed, TransferReport
from pddbridge.tls import LinkTls
from tests.support.certs import PEERS, link_tls
from tests.support.cutting_proxy import Fault
from tests.support.tcp_link import FAST, RECEIVER, SENDER, TOKENS, assert_exact, between, eventually, push_in_chunks, receiving, sending

OURS = link_tls("prefill-1")
THEIRS = link_tls("main-1")


async def move(settings: SenderSettings, port: int, sender_handshake: Handshake = SENDER) -> TransferReport:
    async with sending(settings, sender_handshake) as sender:
        transfer = sender.open("127.0.0.1", port, 22, 7, TOKENS)
        push_in_chunks(transfer)
        async with asyncio.timeout(15):
            return await transfer.done()


async def test_kv_moves_exactly_and_is_not_readable_on_the_wire():
    async with receiving(tls=THEIRS) as target, between(target) as (_, port):
        target.server.expect(7, TOKENS)
        report = await move(replace(FAST, tls=OURS), port)
        assert report.bytes == target.server.counters.bytes_received > 0
        assert_exact(target)
        # The same port in plaintext: nothing but a refusal.
        sock = await tcp_io.connect("127.0.0.1", port)
        await tcp_io.send(sock, bytes(64), memoryview(b""))
        async with asyncio.timeout(5):
            with pytest.raises(OSError, match=r"closed|reset"):
                await tcp_io.receive(sock, 4096)
        sock.close()
        await eventually(lambda: target.server.counters.handshakes_refused == 1)


# In the handshake, and among frames.
@pytest.mark.parametrize(("kind", "at"), [("cut", 200), ("flip", 200), ("cut_replies", 200), ("cut", 9_000), ("flip", 9_000)])
async def test_a_broken_connection_is_made_again_whatever_broke(kind: Literal["cut", "flip", "cut_replies"], at: int):
    async with receiving(tls=THEIRS) as target, between(target, Fault(kind, at), Fault(kind, at + 2_000)) as (proxy, port):
        target.server.expect(7, TOKENS)
        await move(replace(FAST, tls=OURS, num_connections=1), port)
        assert proxy.num_connections >= 2
        assert_exact(target)


@pytest.mark.parametrize(
    ("tls", "reason"),
    [
        (link_tls("prefill-1", signed_by="another"), "unknown ca"),
        (link_tls("relay-1"), "prefill-1"),
        (link_tls("main-7"), "prefill-1"),
    ],
    ids=["wrong authority", "another worker's certificate", "a worker nobody knows"],
)
async def test_a_sender_that_does_not_prove_its_name_is_refused_at_once_by_both(
    tls: LinkTls, reason: str, caplog: pytest.LogCaptureFixture
):
    async with receiving(tls=THEIRS) as target:
        target.server.expect(7, TOKENS)
        with pytest.raises(TransferFailed, match="certificate differs") as caught:
            await move(replace(FAST, tls=tls, num_connections=1), target.port)
        assert caught.value.code == "INVALID_ARGUMENT"
        assert reason in str(caught.value)
        assert "prefill-1" in str(caught.value)
        assert target.server.counters.handshakes_refused >= 1
        assert target.num_placing == 0
    assert "main-1" in caplog.text  # the receiver's own record names itself, and the sender by name or address


async def test_a_receiver_that_our_authority_did_not_sign_gets_nothing():
    async with receiving(tls=link_tls("main-1", signed_by="another", believes="ours")) as target:
        with pytest.raises(TransferFailed, match=r"self-signed|issuer|certificate verify failed"):
            await move(replace(FAST, tls=OURS, num_connections=1), target.port)
        await eventually(lambda: target.server.counters.handshakes_refused >= 1)


async def test_a_receiver_with_another_workers_certificate_gets_nothing():
    async with receiving(tls=link_tls("relay-1")) as target:  # says that it is main-1
        target.server.expect(7, TOKENS)
        with pytest.raises(TransferFailed, match=PEERS["main-1"]):
            await move(replace(FAST, tls=OURS, num_connections=1), target.port)
        assert target.server.counters.bytes_received == 0


async def test_no_certificate_is_refused_and_counted():
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    async with receiving(tls=THEIRS) as target:
        sock = await tls_io.client_side(await tcp_io.connect("127.0.0.1", target.port), bare)
        with pytest.raises(ssl.SSLError) as caught:
            await tcp_io.receive(sock, 1)
        assert tls_io.is_final(caught.value)
        sock.close()
        await eventually(lambda: target.server.counters.handshakes_refused == 1)


async def test_a_plaintext_sender_and_a_tls_port_part_without_a_byte_of_kv():
    settings = replace(FAST, num_connections=1, max_attempts=2)
    async with receiving(tls=THEIRS) as target:
        with pytest.raises(TransferFailed):
            await move(settings, target.port)
        assert target.server.counters.handshakes_refused >= 2
    async with receiving() as plain:
        with pytest.raises(TransferFailed):
            await move(replace(settings, tls=OURS), plain.port)
        assert plain.server.counters.frames_refused >= 2


async def test_a_tls_handshake_that_does_not_go_on_is_dropped():
    async with receiving(tls=THEIRS, handshake_timeout_s=0.2) as target:
        sock = await tcp_io.connect("127.0.0.1", target.port)
        await tcp_io.send(sock, b"\x16\x03\x01\x02\x00", memoryview(b""))
        await eventually(lambda: target.server.counters.num_connections == 1)
        async with asyncio.timeout(5):
            with pytest.raises(OSError, match=r"closed|reset"):
                await tcp_io.receive(sock, 1)
        await eventually(lambda: target.server.counters.num_connections == 0)
        sock.close()


async def test_identities_that_join_later_are_let_in():
    peers = dict(PEERS)
    late = replace(SENDER, name="prefill-9", epoch=31)
    async with receiving(RECEIVER, tls=link_tls("main-1", peers=peers)) as target:
        target.server.expect(7, TOKENS)
        settings = replace(FAST, tls=link_tls("prefill-9"), num_connections=1)
        with pytest.raises(TransferFailed, match="no peer is named 'prefill-9'"):
            await move(settings, target.port, late)
        peers["prefill-9"] = "prefill-9.prefill.pdd.internal"
        target.server.expect(8, TOKENS)
        async with sending(settings, late) as sender:
            transfer = sender.open("127.0.0.1", target.port, 22, 8, TOKENS)
            push_in_chunks(transfer)
            await transfer.done()
