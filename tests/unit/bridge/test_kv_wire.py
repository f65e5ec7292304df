"""The bytes of frames and replies: golden, deliberately wrong, and fuzzed. The expected bytes are put together here by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    REPLY_BYTES,
    NackReason,
    Reply,
    WireError,
    WireFault,
    block_of,
    decode_frame_header,
    decode_reply,
    empty_values,
    encode_frame_header,
    encode_reply,
    frame_of,
    payload_view,
)

# Two groups: layers 0-1 with k and v of 3 heads, layer 2 with one latent plane.
SPEC = KVSpec(
    (
        KVGroup(0, 2, (KVPlane("k", 3, 2), KVPlane("v", 3, 2))),
        KVGroup(2, 1, (KVPlane("latent", 1, 4),)),
    ),
    "bfloat16",
)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def le(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


FIELDS = {  # name -> (offset, size), as in the README's table
    "magic": (0, 4),
    "version": (4, 2),
    "kind": (6, 2),
    "transfer_id": (8, 8),
    "epoch": (16, 8),
    "sequence": (24, 8),
    "group": (32, 2),
    "plane": (34, 2),
    "layer_start": (36, 4),
    "layer_stop": (40, 4),
    "token_start": (44, 4),
    "token_stop": (48, 4),
    "head_start": (52, 4),
    "head_stop": (56, 4),
    "codec": (60, 1),
    "dtype": (61, 1),
    "reserved": (62, 2),
    "payload_crc": (64, 4),
    "payload_bytes": (68, 8),
}
PAYLOAD = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], np.float32).astype(ml_dtypes.bfloat16)
GOOD = {
    "magic": int.from_bytes(b"PDDK", "little"),
    "version": 1,
    "kind": 16,
    "transfer_id": 2**63 + 5,
    "epoch": 2**64 - 1,
    "sequence": 2**32 + 1,
    "group": 0,
    "plane": 1,
    "layer_start": 0,
    "layer_stop": 2,
    "token_start": 100,
    "token_stop": 101,
    "head_start": 0,
    "head_stop": 3,
    "codec": 0,
    "dtype": 2,
    "reserved": 0,
    "payload_crc": slow_crc32c(PAYLOAD.tobytes()),
    "payload_bytes": 24,
}


def header_bytes(**changes: int) -> bytes:
    """A header put together field by field, with a right checksum."""
    data = b"".join(le(value, FIELDS[name][1]) for name, value in {**GOOD, **changes}.items())
    return data + le(slow_crc32c(data), 4)


def golden_block() -> KVBlock:
    return KVBlock("v", LayerRange(0, 2), TokenRange(100, 101), HeadRange(0, 3), PAYLOAD.reshape(2, 1, 3, 2))


def test_slow_crc_is_crc32c() -> None:
    assert slow_crc32c(b"123456789") == 0xE3069283


def test_golden_frame() -> None:
    header = frame_of(SPEC, GOOD["transfer_id"], GOOD["epoch"], GOOD["sequence"], golden_block())
    assert encode_frame_header(header) == header_bytes()
    assert len(header_bytes()) == FRAME_HEADER_BYTES == 80
    assert decode_frame_header(header_bytes(), SPEC) == header
    # bfloat16 1.0 is 0x3f80, 2.0 0x4000: little endian, dim fastest
    assert bytes(payload_view(golden_block().values))[:4] == bytes.fromhex("803f0040")


def test_received_payload_becomes_the_block_that_was_sent() -> None:
    header = decode_frame_header(header_bytes(), SPEC)
    values = empty_values(header, SPEC)
    payload_view(values)[:] = PAYLOAD.tobytes()
    block = block_of(header, SPEC, values)
    assert (block.plane, block.layers, block.tokens, block.heads) == ("v", LayerRange(0, 2), TokenRange(100, 101), HeadRange(0, 3))
    assert block.values.tobytes() == PAYLOAD.tobytes()
    payload_view(values)[7] ^= 1
    with pytest.raises(WireError) as caught:
        block_of(header, SPEC, values)
    assert caught.value.fault is WireFault.CHECKSUM


def test_planes_of_the_second_group_are_found() -> None:
    data = header_bytes(group=1, plane=0, layer_start=2, layer_stop=3, head_stop=1, payload_bytes=8)
    assert block_of_nothing(data).plane == "latent"


def block_of_nothing(data: bytes) -> KVBlock:
    header = decode_frame_header(data, SPEC)
    values = empty_values(header, SPEC)
    payload_view(values)[:] = bytes(header.payload_bytes)
    fixed = decode_frame_header(_with_crc(data, slow_crc32c(bytes(header.payload_bytes))), SPEC)
    return block_of(fixed, SPEC, values)


def _with_crc(data: bytes, payload_crc: int) -> bytes:
    changed = data[:64] + le(payload_crc, 4) + data[68:76]
    return changed + le(slow_crc32c(changed), 4)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"magic": 0x04034B50}, WireFault.MAGIC),
        ({"version": 2}, WireFault.VERSION),
        ({"kind": 17}, WireFault.KIND),
        ({"kind": 0xFFFF}, WireFault.KIND),
        ({"reserved": 1}, WireFault.RESERVED),
        ({"codec": 1}, WireFault.CODEC),
        ({"dtype": 1}, WireFault.DTYPE),
        ({"dtype": 0}, WireFault.DTYPE),
        ({"dtype": 255}, WireFault.DTYPE),
        ({"group": 2}, WireFault.PLANE),
        ({"group": 65535}, WireFault.PLANE),
        ({"plane": 2}, WireFault.PLANE),
        ({"group": 1}, WireFault.PLANE),
        ({"layer_stop": 3}, WireFault.RANGE),  # into the next group
        ({"layer_start": 2, "layer_stop": 2}, WireFault.RANGE),
        ({"layer_start": 2**32 - 1, "layer_stop": 1}, WireFault.RANGE),
        ({"group": 1, "plane": 0}, WireFault.RANGE),  # layers of the other group
        ({"token_start": 101}, WireFault.RANGE),
        ({"token_start": 102}, WireFault.RANGE),
        ({"head_stop": 4}, WireFault.RANGE),
        ({"head_start": 3, "head_stop": 3}, WireFault.RANGE),
        ({"payload_bytes": 0}, WireFault.SIZE),
        ({"payload_bytes": 25}, WireFault.SIZE),
        ({"payload_bytes": 2**63}, WireFault.SIZE),
        ({"payload_bytes": 2**64 - 24}, WireFault.SIZE),
        ({"token_stop": 101 + 2**31}, WireFault.SIZE),
        ({"token_start": 0, "token_stop": 2**32 - 1, "payload_bytes": (2**32 - 1) * 24}, WireFault.SIZE),  # consistent, far too large
        ({"token_start": 0, "token_stop": 2**29, "payload_bytes": (2**29 * 24) % 2**32}, WireFault.SIZE),  # a product taken in 32 bits
    ],
)
def test_wrong_headers_are_refused_for_the_right_reason(changes: dict[str, int], fault: WireFault) -> None:
    with pytest.raises(WireError) as caught:
        decode_frame_header(header_bytes(**changes), SPEC)
    assert caught.value.fault is fault


def test_the_largest_frame_is_taken_and_one_token_more_is_not() -> None:
    spec = KVSpec.gqa(1, 1, 64, "float32")
    most = MAX_PAYLOAD_BYTES // 256
    common = {"plane": 0, "layer_stop": 1, "token_start": 0, "head_stop": 1, "dtype": 1}
    assert decode_frame_header(header_bytes(**common, token_stop=most, payload_bytes=most * 256), spec).payload_bytes == MAX_PAYLOAD_BYTES
    with pytest.raises(WireError) as caught:
        decode_frame_header(header_bytes(**common, token_stop=most + 1, payload_bytes=(most + 1) * 256), spec)
    assert caught.value.fault is WireFault.SIZE


@pytest.mark.parametrize("position", range(FRAME_HEADER_BYTES))
def test_one_wrong_bit_anywhere_in_a_header_is_noticed(position: int) -> None:
    data = bytearray(header_bytes())
    data[position] ^= 1 << (position % 8)
    with pytest.raises(WireError) as caught:
        decode_frame_header(data, SPEC)
    assert caught.value.fault in (WireFault.MAGIC, WireFault.VERSION, WireFault.KIND, WireFault.CHECKSUM)


@pytest.mark.parametrize("size", [0, 7, 8, 79, 81])
def test_headers_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(WireError) as caught:
        decode_frame_header((header_bytes() + b"\0")[:size], SPEC)
    assert caught.value.fault is WireFault.TRUNCATED


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.integers(0, 2**64 - 1), max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_header_is_refused_or_consistent(changes: dict[str, int]) -> None:
    cut = {name: value % 256 ** FIELDS[name][1] for name, value in changes.items()}
    try:
        header = decode_frame_header(header_bytes(**cut), SPEC)
    except WireError:
        return
    plane = SPEC.groups[header.group].planes[header.plane]
    num_values = len(header.layers) * len(header.tokens) * len(header.heads) * plane.head_dim
    assert 0 < header.payload_bytes == num_values * 2 <= MAX_PAYLOAD_BYTES
    assert encode_frame_header(header) == header_bytes(**cut)


def test_a_block_that_fits_no_frame_is_refused() -> None:
    spec = KVSpec.gqa(1, 1, 64, "float32")
    for num_tokens in (0, MAX_PAYLOAD_BYTES // 256 + 1):
        block = KVBlock("k", LayerRange(0, 1), TokenRange(0, num_tokens), HeadRange(0, 1), np.zeros((1, num_tokens, 1, 64), np.float32))
        with pytest.raises(ValueError, match="a frame carries"):
            frame_of(spec, 1, 1, 1, block)
    with pytest.raises(ValueError, match="encode_frame_header"):
        encode_frame_header(frame_of(SPEC, 2**64, 0, 0, golden_block()))


def reply_bytes(kind: int, transfer_id: int, epoch: int, sequence: int, reason: int) -> bytes:
    data = b"PDDK" + le(1, 2) + le(kind, 2) + le(transfer_id, 8) + le(epoch, 8) + le(sequence, 8) + le(reason, 4)
    return data + le(slow_crc32c(data), 4)


@pytest.mark.parametrize("reason", [None, *NackReason])
def test_golden_replies(reason: NackReason | None) -> None:
    golden = reply_bytes(17 if reason is None else 18, 2**63, 2**64 - 1, 9, reason or 0)
    assert encode_reply(Reply(2**63, 2**64 - 1, 9, reason)) == golden
    assert len(golden) == REPLY_BYTES == 40
    assert decode_reply(golden) == Reply(2**63, 2**64 - 1, 9, reason)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (reply_bytes(17, 1, 1, 1, 1), WireFault.RANGE),
        (reply_bytes(18, 1, 1, 1, 0), WireFault.RANGE),
        (reply_bytes(18, 1, 1, 1, 6), WireFault.RANGE),
        (reply_bytes(16, 1, 1, 1, 0), WireFault.KIND),
        (reply_bytes(17, 1, 1, 1, 0)[:-1] + b"\0", WireFault.CHECKSUM),
        (reply_bytes(17, 1, 1, 1, 0)[:-1], WireFault.TRUNCATED),
    ],
)
def test_wrong_replies_are_refused(data: bytes, fault: WireFault) -> None:
    with pytest.raises(WireError) as caught:
        decode_reply(data)
    assert caught.value.fault is fault
