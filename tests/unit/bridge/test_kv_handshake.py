"""Handshake messages: what must be equal is compared on both sides, and bodies are bounded and typed. Cases 3 and 109 (frame level)."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from crc32c import crc32c

from pddbridge.kv_handshake import (
    HANDSHAKE_HEADER_BYTES,
    MAX_BODY_BYTES,
    Handshake,
    HandshakeError,
    check_hello,
    check_welcome,
    decode_body,
    decode_message_header,
    encode_message,
    hello,
    parse_refuse,
    payload_bytes_of,
    refuse,
    welcome,
)
from pddbridge.kv_spec import KVSpec
from pddbridge.kv_wire import Kind, WireError, WireFault

SENDER = Handshake(1, "f1", KVSpec.gqa(2, 3, 4, "bfloat16"), 11, "prefill-1")
RECEIVER = replace(SENDER, epoch=2**64 - 1, name="main-1")


def body_of(message: bytes) -> dict[str, str]:
    _, size, crc = decode_message_header(message[:HANDSHAKE_HEADER_BYTES], ("hello", "welcome", "refuse"))
    assert size == len(message) - HANDSHAKE_HEADER_BYTES
    return decode_body(message[HANDSHAKE_HEADER_BYTES:], crc)


def test_equal_sides_agree() -> None:
    theirs = check_hello(body_of(hello(SENDER, RECEIVER.epoch)), RECEIVER)
    assert (theirs.name, theirs.epoch) == ("prefill-1", 11)
    assert check_welcome(body_of(welcome(RECEIVER)), SENDER, RECEIVER.epoch).epoch == 2**64 - 1


def test_a_welcome_says_how_large_a_frame_may_be() -> None:
    assert payload_bytes_of(body_of(welcome(RECEIVER))) == 1 << 20
    for said, taken in ((1 << 20, 1 << 20), (3_000_000, 3_000_000), (1 << 62, 4 << 20)):
        assert payload_bytes_of(body_of(welcome(RECEIVER, max_payload_bytes=said))) == taken


@pytest.mark.parametrize("text", ["", "-1", "1e7", "0", str((1 << 20) - 1), str(2**64), "9" * 5000])
def test_no_receiver_takes_less_than_a_mebibyte(text: str) -> None:
    with pytest.raises(WireError) as caught:
        payload_bytes_of({"max_payload_bytes": text})
    assert caught.value.fault is WireFault.BODY


@pytest.mark.parametrize(
    ("other", "field", "sender_value", "receiver_value"),
    [
        (replace(RECEIVER, protocol_version=2), "protocol_version", "1", "2"),
        (
            replace(RECEIVER, wire_layout="layers,tokens,heads,dim;2"),
            "wire_layout",
            "layers,tokens,heads,dim;1",
            "layers,tokens,heads,dim;2",
        ),
        (replace(RECEIVER, fingerprint="f2"), "fingerprint", "f1", "f2"),
        (replace(RECEIVER, kv_spec=KVSpec.gqa(2, 3, 4, "float32")), "kv_spec", "bfloat16", "float32"),
        (replace(RECEIVER, kv_spec=KVSpec.gqa(2, 4, 4, "bfloat16")), "kv_spec", '"num_heads":3', '"num_heads":4'),
        (replace(RECEIVER, epoch=5), "receiver_epoch", str(2**64 - 1), "5"),
    ],
)
def test_case_3_a_difference_is_refused_on_both_sides_with_both_values(
    other: Handshake, field: str, sender_value: str, receiver_value: str
) -> None:
    with pytest.raises(HandshakeError) as at_receiver:
        check_hello(body_of(hello(SENDER, RECEIVER.epoch)), other)
    told = parse_refuse(body_of(refuse(at_receiver.value)))
    with pytest.raises(HandshakeError) as at_sender:  # even a receiver that does not look is found out
        check_welcome(body_of(welcome(other)), SENDER, RECEIVER.epoch)
    for error in (at_receiver.value, told, at_sender.value):
        assert error.field == field
        assert (error.sender, error.receiver) == ("prefill-1", "main-1")
        assert sender_value in error.sender_value
        assert receiver_value in error.receiver_value
        assert error.sender_value in str(error)
        assert error.receiver_value in str(error)


def test_a_refusal_fits_its_bound_whatever_it_quotes() -> None:
    long = "\U0001f600" * 4096
    with pytest.raises(HandshakeError) as caught:
        check_hello(
            body_of(encode_message("hello", {**body_of(hello(SENDER, 1)), "fingerprint": "x" * 40_000, "name": long[:1500]})), RECEIVER
        )
    assert len(refuse(caught.value)) < MAX_BODY_BYTES
    assert len(refuse(HandshakeError(long, long, long, long, long))) < MAX_BODY_BYTES


@pytest.mark.parametrize("missing", ["name", "epoch", "receiver_epoch", "protocol_version", "wire_layout", "kv_spec", "fingerprint"])
def test_an_incomplete_hello_is_refused(missing: str) -> None:
    body = body_of(hello(SENDER, RECEIVER.epoch))
    del body[missing]
    with pytest.raises(WireError, match=missing):
        check_hello(body, RECEIVER)
    with pytest.raises(WireError, match="lacks"):
        parse_refuse({"field": "x"})


@pytest.mark.parametrize("epoch", ["", "-1", "1.0", str(2**64), "9" * 5000, "0x10", "١"])
def test_an_epoch_is_a_64_bit_number(epoch: str) -> None:
    with pytest.raises(WireError) as caught:
        check_hello({**body_of(hello(SENDER, RECEIVER.epoch)), "epoch": epoch}, RECEIVER)
    assert caught.value.fault is WireFault.BODY


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'"x"', b"{", b'{"a": 1}', b'{"a": null}', b'{"a": {"b": "c"}}', b"\xff\xfe", b"[" * 60_000, pickle.dumps({"a": "b"})],
)
def test_a_body_is_an_object_of_strings(body: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode_body(body, crc32c(body))
    assert caught.value.fault is WireFault.BODY


def test_a_changed_body_or_header_is_noticed() -> None:
    message = bytearray(hello(SENDER, 1))
    header, body = message[:HANDSHAKE_HEADER_BYTES], message[HANDSHAKE_HEADER_BYTES:]
    kind, _, crc = decode_message_header(header, ("hello",))
    assert kind is Kind.HELLO
    body[5] ^= 1
    with pytest.raises(WireError) as caught:
        decode_body(body, crc)
    assert caught.value.fault is WireFault.CHECKSUM
    for position in range(HANDSHAKE_HEADER_BYTES):
        broken = bytearray(header)
        broken[position] ^= 0x10
        with pytest.raises(WireError):
            decode_message_header(broken, ("hello",))
    with pytest.raises(WireError) as caught:
        decode_message_header(header, ("welcome", "refuse"))
    assert caught.value.fault is WireFault.KIND
    with pytest.raises(WireError) as caught:
        decode_message_header(header[:-1], ("hello",))
    assert caught.value.fault is WireFault.TRUNCATED


def test_a_body_is_bounded_on_both_sides() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode_message("hello", {"a": "x" * MAX_BODY_BYTES})
    header = b"PDDK" + (1).to_bytes(2, "little") + (1).to_bytes(2, "little") + (MAX_BODY_BYTES + 1).to_bytes(4, "little") + bytes(4)
    with pytest.raises(WireError) as caught:
        decode_message_header(header + crc32c(header).to_bytes(4, "little"), ("hello",))
    assert caught.value.fault is WireFault.SIZE


@pytest.mark.parametrize("changes", [{"epoch": -1}, {"epoch": 2**64}, {"name": "x" * 5000}])
def test_a_handshake_that_cannot_be_sent_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Handshake\."):
        replace(SENDER, **changes)  # type: ignore[arg-type]


def test_bodies_are_plain_json() -> None:
    message = hello(SENDER, 7)
    assert json.loads(message[HANDSHAKE_HEADER_BYTES:])["receiver_epoch"] == "7"
