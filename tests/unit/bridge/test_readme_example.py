"""The worked example in bridge/README.md is what the code sends and reads."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_handshake import (
    HANDSHAKE_HEADER_BYTES,
    PROTOCOL_VERSION,
    Handshake,
    check_hello,
    decode_body,
    decode_message_header,
    hello,
)
from pddbridge.kv_notes import NOTE_BYTES, Note, decode_have_body, decode_note, encode_have, encode_note, have_body_bytes
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    Kind,
    NackReason,
    Reply,
    block_of,
    decode_frame_header,
    decode_reply,
    empty_values,
    encode_frame_header,
    encode_reply,
    frame_of,
    payload_view,
)

README = (Path(__file__).parents[3] / "bridge" / "README.md").read_text(encoding="utf-8")
SPEC = KVSpec.gqa(2, 2, 2, "bfloat16")
TRANSFER_ID, EPOCH = 0x0102030405060708, 0x1122334455667788


def fenced(label: str) -> str:
    """The text of the code block with this label."""
    found = re.findall(rf"^```{label}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, label
    return str(found[0])


def hex_block(name: str) -> bytes:
    """Leading hex pairs of each line; two or more blanks may stand between fields, the comment is what follows the last pair."""
    return b"".join(bytes.fromhex(re.match(r"(?:[0-9a-f]{2} {1,2})+", line).group()) for line in fenced(f"hex {name}").splitlines())  # type: ignore[union-attr]


def the_block() -> KVBlock:
    values = np.array([1, 2, 3, 4, -1, -2, -3, -4], np.float32).astype(ml_dtypes.bfloat16).reshape(1, 2, 2, 2)
    return KVBlock("v", LayerRange(1, 2), TokenRange(5, 7), HeadRange(0, 2), values)


def test_the_frame_reads_as_described() -> None:
    data = hex_block("frame")
    header = decode_frame_header(data[:FRAME_HEADER_BYTES], SPEC)
    values = empty_values(header, SPEC)
    payload_view(values)[:] = data[FRAME_HEADER_BYTES:]
    block, want = block_of(header, SPEC, values), the_block()
    assert (header.transfer_id, header.epoch, header.sequence) == (TRANSFER_ID, EPOCH, 3)
    assert (block.plane, block.layers, block.tokens, block.heads) == (want.plane, want.layers, want.tokens, want.heads)
    assert np.array_equal(block.values, want.values)


def test_the_frame_is_sent_as_described() -> None:
    header = frame_of(SPEC, TRANSFER_ID, EPOCH, 3, the_block())
    assert encode_frame_header(header) + bytes(payload_view(the_block().values)) == hex_block("frame")


@pytest.mark.parametrize(("name", "reason"), [("ack", None), ("nack", NackReason.FENCED)])
def test_replies_are_as_described(name: str, reason: NackReason | None) -> None:
    reply = Reply(TRANSFER_ID, EPOCH, 3, reason)
    assert decode_reply(hex_block(name)) == reply
    assert encode_reply(reply) == hex_block(name)


def test_the_question_and_its_answer_are_as_described() -> None:
    rectangle = (0, 1, LayerRange(0, 2), TokenRange(5, 7), HeadRange(0, 2))
    assert encode_note(Note(Kind.ASK, TRANSFER_ID, EPOCH, 9)) == hex_block("ask")
    have = hex_block("have")
    assert encode_have(TRANSFER_ID, EPOCH, 9, [rectangle]) == have
    note = decode_note(have[:NOTE_BYTES], (Kind.HAVE,))
    assert have_body_bytes(note) == len(have) - NOTE_BYTES
    assert decode_have_body(have[NOTE_BYTES:], SPEC) == [rectangle]


def test_the_hello_is_as_described() -> None:
    header, body = hex_block("hello"), fenced("json hello").strip().encode()
    assert hello(Handshake(PROTOCOL_VERSION, "5f1e", SPEC, 12, "prefill-1"), EPOCH) == header + body
    assert len(header) == HANDSHAKE_HEADER_BYTES
    _, size, crc = decode_message_header(header, ("hello",))
    assert size == len(body)
    assert check_hello(decode_body(body, crc), Handshake(PROTOCOL_VERSION, "5f1e", SPEC, EPOCH, "main-1")).epoch == 12


def test_field_tables_add_up() -> None:
    """Offsets and sizes of each table are without gaps, up to the size in its heading."""
    for heading, start, stop in (
        ("### Frame: 80 bytes", 8, 80),
        ("### Notes: 40 bytes", 8, 40),
        ("### Hello, welcome, refuse: 20 bytes", 8, 20),
    ):
        section = README.split(heading)[1].split("\n#")[0]
        rows = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", section, re.MULTILINE)]
        assert rows
        for offset, size in rows:
            assert offset == start
            start += size
        assert start == stop
