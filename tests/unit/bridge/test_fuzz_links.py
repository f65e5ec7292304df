"""Anything may come from the network: no crash, nothing allocated beyond what was negotiated, every refusal typed and counted.

Short here; PDD_FUZZ_SECONDS sets how long the slow test goes on (600 unless told). Cases 109, 112 and 114 at the level of frames.
"""

from __future__ import annotations

import ast
import asyncio
import os
import pickle
import random
import socket
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.codecs import CODECS, CodecId
from pddbridge.kv_handshake import (
    HANDSHAKE_HEADER_BYTES,
    MAX_BODY_BYTES,
    Handshake,
    HandshakeError,
    check_hello,
    check_welcome,
    codecs_of,
    decode_body,
    decode_message_header,
    encode_message,
    hello,
    parse_refuse,
    payload_bytes_of,
)
from pddbridge.kv_notes import NOTE_BYTES, Note, decode_have_body, decode_note, encode_note, have_body_bytes
from pddbridge.kv_spec import TokenRange
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    LARGEST_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Kind,
    WireError,
    decode_frame_header,
    decoded_block_of,
    empty_values,
    encode_frame_header,
)
from pddbridge.links import tcp_io
from tests.support.tcp_link import RECEIVER, SENDER, SPEC, TOKENS, eventually, frame, push_in_chunks, raw_connection, receiving, sending

NOTES = (Kind.ACK, Kind.NACK, Kind.ASK, Kind.HAVE, Kind.STOP, Kind.PING, Kind.PONG)
FUZZ_SECONDS = float(os.environ.get("PDD_FUZZ_SECONDS", "600"))
HELLO = hello(SENDER, RECEIVER.epoch)


def sealed(header: bytes) -> bytes:
    return header + crc32c(header).to_bytes(4, "little")


def read_anything(data: bytes) -> None:
    """Each reader on ``data``, as it is and with its checksums made right. What a reader takes must be within the bounds."""
    for whole in (data, None):
        for reader, size in ((_read_frame, FRAME_HEADER_BYTES), (_read_note, NOTE_BYTES), (_read_handshake, HANDSHAKE_HEADER_BYTES)):
            head = data[:size] if whole else sealed(data[: size - 4])
            try:
                reader(head, data[size:])
            except (WireError, HandshakeError):
                continue


def _read_frame(head: bytes, rest: bytes) -> None:
    header = decode_frame_header(head, SPEC, CODECS)
    values = empty_values(header, SPEC)
    assert 0 < header.payload_bytes <= MAX_PAYLOAD_BYTES
    assert values.nbytes <= MAX_PAYLOAD_BYTES
    if header.codec is not CodecId.RAW:
        payload = bytearray((rest * (header.payload_bytes // max(1, len(rest)) + 1) + bytes(header.payload_bytes))[: header.payload_bytes])
        decoded_block_of(replace(header, payload_crc=crc32c(payload)), SPEC, payload, values)


def _read_note(head: bytes, rest: bytes) -> None:
    note = decode_note(head, NOTES)
    if note.kind is Kind.HAVE:
        size = have_body_bytes(note)
        assert size < 1 << 16
        body = rest[:size].ljust(size, b"\0")
        decode_have_body(body[:-4] + crc32c(body[:-4]).to_bytes(4, "little"), SPEC)


def _read_handshake(head: bytes, rest: bytes) -> None:
    kind, size, _ = decode_message_header(head, ("hello", "welcome", "refuse"))
    assert size <= MAX_BODY_BYTES
    body = decode_body(rest[:size], crc32c(rest[:size]))
    codecs_of(body)
    assert MAX_PAYLOAD_BYTES <= payload_bytes_of(body) <= LARGEST_PAYLOAD_BYTES
    if kind is Kind.REFUSE:
        parse_refuse(body)
    elif kind is Kind.HELLO:
        check_hello(body, RECEIVER)
    else:
        check_welcome(body, SENDER, RECEIVER.epoch)


def messages(rng: random.Random) -> bytes:
    """A message that is nearly right: a good one with some fields of it written over."""
    header, payload = frame(1, 22, TokenRange(0, 4), rng.getrandbits(64))
    good = rng.choice(
        [
            encode_frame_header(replace(header, codec=rng.choice(list(CodecId)))) + payload,
            encode_note(Note(rng.choice([k for k in NOTES if k not in (Kind.NACK, Kind.STOP)]), 1, 22, 3)),
            HELLO,
            encode_message("welcome", {"codecs": "x" * rng.randrange(50), "epoch": str(rng.getrandbits(rng.randrange(1, 80)))}),
        ]
    )
    data = bytearray(good)
    for _ in range(rng.randrange(4)):
        at, size = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
        value = rng.choice([0, 1, 255, (1 << 8 * size) - 1, 1 << (8 * size - 1), rng.getrandbits(8 * size)]) % (1 << 8 * size)
        data[at : at + size] = value.to_bytes(size, "little")
    return bytes(data)


@given(st.one_of(st.binary(max_size=400), st.integers(0, 2**32).map(lambda seed: messages(random.Random(seed)))))
@settings(max_examples=400, deadline=None)
def test_whatever_the_bytes_they_are_read_or_refused(data: bytes) -> None:
    read_anything(data)


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_SECONDS + 120)
def test_whatever_the_bytes_for_long() -> None:
    """Memory stays flat: the peak of the second half is that of the first."""
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    tracemalloc.start()
    ends, peaks = time.monotonic() + FUZZ_SECONDS, []
    for half in (0.5, 0.0):
        tracemalloc.reset_peak()
        num_read = 0
        while time.monotonic() < ends - half * FUZZ_SECONDS:
            data = messages(rng) if rng.random() < 0.8 else rng.randbytes(rng.randrange(300))
            try:
                read_anything(data)
            except BaseException:
                print(f"seed {seed}, message {num_read}: {data.hex()}")
                raise
            num_read += 1
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 32 << 20
    assert peaks[1] < 2 * peaks[0] + (1 << 20)


async def test_a_server_that_is_sent_anything_lives_and_counts_it() -> None:
    """Every connection is closed or answered; each refusal is in a counter; a friend is served afterwards."""
    rng = random.Random(114)
    tracemalloc.start()
    async with receiving(handshake_timeout_s=0.2) as target, sending() as sender:
        target.server.expect(1, TOKENS)
        refused = 0
        for number in range(60):
            data = bytearray(messages(rng))
            sock = await raw_connection(target.port) if number % 2 else await tcp_io.connect("127.0.0.1", target.port)
            data[rng.randrange(8)] ^= 1 + rng.randrange(255)  # magic, version or kind: nobody can take it
            before = target.server.counters
            await tcp_io.send(sock, bytes(data), memoryview(b""))
            sock.shutdown(socket.SHUT_WR)
            await eventually(lambda: target.server.counters.num_connections == 0)
            sock.close()
            after = target.server.counters
            counted = after.frames_refused + after.handshakes_refused - before.frames_refused - before.handshakes_refused
            assert counted == 1, data.hex()
            refused += counted
        assert refused == 60
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
        tracemalloc.stop()
        transfer = sender.open("127.0.0.1", target.port, 22, 1, TOKENS)
        push_in_chunks(transfer)
        await transfer.done()


@pytest.mark.parametrize("size", [0, 2**31, 2**63, 2**64 - 1])
async def test_case_114_an_announced_size_is_never_allocated(size: int) -> None:
    header, _ = frame(1, 22, TokenRange(0, 4))
    head = encode_frame_header(header)[:68] + size.to_bytes(8, "little")
    tracemalloc.start()
    async with receiving() as target:
        target.server.expect(1, TOKENS)
        sock = await raw_connection(target.port)
        await tcp_io.send(sock, sealed(head), memoryview(b""))
        with pytest.raises(OSError, match=r"closed|reset"):
            await asyncio.wait_for(tcp_io.receive(sock, 1), 5)
        sock.close()
        assert target.server.counters.frames_refused == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        tracemalloc.stop()


class Opens:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("after_hello", [False, True])
async def test_case_109_a_pickle_is_refused_and_never_run(tmp_path: Path, after_hello: bool) -> None:
    data = pickle.dumps(Opens(tmp_path / "proof"))
    body = encode_message("hello", {})[:HANDSHAKE_HEADER_BYTES]
    in_body = sealed(body[:8] + len(data).to_bytes(4, "little") + crc32c(data).to_bytes(4, "little")) + data
    async with receiving(handshake_timeout_s=0.2) as target:
        for attempt in (data.ljust(200, b"."), in_body):
            sock = await raw_connection(target.port) if after_hello else await tcp_io.connect("127.0.0.1", target.port)
            before = target.server.counters.frames_refused
            await tcp_io.send(sock, attempt, memoryview(b""))
            with pytest.raises(OSError, match=r"closed|reset"):
                await asyncio.wait_for(tcp_io.receive(sock, 1), 5)
            sock.close()
            assert target.server.counters.frames_refused == before + 1
    assert list(tmp_path.iterdir()) == []
    pickle.loads(data).close()
    assert [path.name for path in tmp_path.iterdir()] == ["proof"]  # the pickle would have worked


def test_case_109_nothing_in_the_bridge_can_run_what_it_reads() -> None:
    root = Path(__file__).parents[3] / "bridge" / "pddbridge"
    banned_modules, banned_calls = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, {"eval", "exec", "compile", "__import__"}
    files = [path for path in root.rglob("*.py") if "gen" not in path.parts]
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not banned_modules & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned_modules, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in banned_calls, path
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


async def test_case_112_nothing_that_comes_over_a_link_makes_it_connect_anywhere() -> None:
    """A hello may say what it likes about hosts and ports: unknown fields are read by nobody."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        port = trap.getsockname()[1]
        _, size, crc = decode_message_header(HELLO[:HANDSHAKE_HEADER_BYTES], ("hello",))
        body = decode_body(HELLO[HANDSHAKE_HEADER_BYTES:][:size], crc)
        body |= {"host": "127.0.0.1", "port": str(port), "kv_transfer_params": f'{{"remote_host":"127.0.0.1","remote_port":{port}}}'}
        async with receiving() as target:
            target.server.expect(1, TOKENS)
            sock = await tcp_io.connect("127.0.0.1", target.port)
            await tcp_io.send(sock, encode_message("hello", body), memoryview(b""))
            kind, answer = await tcp_io.receive_message(sock, ("welcome", "refuse"))
            assert kind is Kind.WELCOME
            assert "host" not in answer
            header, payload = frame(1, 22, TokenRange(5, 9))
            await tcp_io.send(sock, encode_frame_header(header), memoryview(payload))
            await eventually(lambda: target.num_placed == 1)
            sock.close()
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_a_handshake_of_another_kind_of_text_is_refused() -> None:
    assert isinstance(RECEIVER, Handshake)
    for body in ({}, {"name": "x"}, {"codecs": "PICKLE"}):
        assert codecs_of(body) == frozenset({CodecId.RAW})
        with pytest.raises(WireError, match="lacks"):
            check_hello(body, RECEIVER)
