"""The golden messages of the wire format: what the pinned generator writes is what is here, what the bridge reads, and what it writes.

The wrong ones must be refused, each for its reason and with nothing allocated that a header asked for.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_handshake import HANDSHAKE_HEADER_BYTES, decode_body, decode_message_header, encode_message
from pddbridge.kv_notes import NOTE_BYTES, Note, decode_have_body, decode_note, encode_have, encode_note, have_body_bytes
from pddbridge.kv_spec import HeadRange, KVGroup, KVPlane, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import (
    FRAME_HEADER_BYTES,
    Kind,
    WireError,
    block_of,
    decode_frame_header,
    empty_values,
    encode_frame_header,
    frame_of,
    payload_view,
)

FOLDER = Path(__file__).parents[2] / "golden" / "kv_wire"
NOTES = (Kind.ACK, Kind.NACK, Kind.ASK, Kind.HAVE, Kind.STOP, Kind.PING, Kind.PONG)


class Vector(TypedDict, total=False):
    name: str
    reader: str
    bytes: str
    fields: dict[str, object]
    values: list[float]
    rectangles: list[list[int]]
    fault: str


DOCUMENT = json.loads((FOLDER / "messages.json").read_text(encoding="utf-8"))
GOOD: list[Vector] = DOCUMENT["good"]
WRONG: list[Vector] = DOCUMENT["wrong"]
SPEC = KVSpec(
    tuple(
        KVGroup(group["first_layer"], group["num_layers"], tuple(KVPlane(*plane) for plane in group["planes"]))
        for group in DOCUMENT["spec"]["groups"]
    ),
    DOCUMENT["spec"]["dtype"],
)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kv_wire_generate", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_frame(data: bytes) -> KVBlock:
    header = decode_frame_header(data[:FRAME_HEADER_BYTES], SPEC)
    values = empty_values(header, SPEC)
    payload_view(values)[:] = data[FRAME_HEADER_BYTES:]
    return block_of(header, SPEC, values)


def read_have(data: bytes) -> list[list[int]]:
    note = decode_note(data[:NOTE_BYTES], NOTES)
    assert have_body_bytes(note) == len(data) - NOTE_BYTES
    found = decode_have_body(data[NOTE_BYTES:], SPEC)
    return [[g, p, *(end for r in ranges for end in (r.start, r.stop))] for g, p, *ranges in found]


def read_handshake(data: bytes) -> dict[str, str]:
    _, size, crc = decode_message_header(data[:HANDSHAKE_HEADER_BYTES], ("hello",))
    assert size == len(data) - HANDSHAKE_HEADER_BYTES
    return decode_body(data[HANDSHAKE_HEADER_BYTES:], crc)


READERS = {"frame": read_frame, "note": lambda data: decode_note(data, NOTES), "have": read_have, "handshake": read_handshake}


def test_the_file_is_what_the_pinned_generator_writes() -> None:
    assert generator().document() == (FOLDER / "messages.json").read_text(encoding="utf-8")
    assert len(GOOD) >= 15
    assert len(WRONG) >= 40
    assert {str(vector["fields"].get("kind")) for vector in GOOD if vector["reader"] in ("note", "have")} == {str(int(k)) for k in NOTES}


@pytest.mark.parametrize("vector", GOOD, ids=lambda vector: vector["name"])
def test_good_messages_are_read_and_written_byte_by_byte(vector: Vector) -> None:
    data, fields = bytes.fromhex(vector["bytes"]), vector["fields"]
    read = READERS[vector["reader"]](data)
    ids = [fields.get(name) for name in ("transfer_id", "epoch", "sequence")]
    match vector["reader"]:
        case "frame":
            assert isinstance(read, KVBlock)
            group = SPEC.groups[fields["group"]]  # type: ignore[call-overload]
            assert read.plane == group.planes[fields["plane"]].name  # type: ignore[call-overload]
            for name, given in (("layers", read.layers), ("tokens", read.tokens), ("heads", read.heads)):
                assert [given.start, given.stop] == fields[name]
            assert read.values.dtype.name == fields["dtype"]
            assert read.values.astype(np.float64).ravel().tolist() == vector["values"]
            header = frame_of(SPEC, *ids, read)  # type: ignore[arg-type]
            assert encode_frame_header(header) + bytes(payload_view(read.values)) == data
        case "note":
            note = Note(Kind(fields["kind"]), *ids, fields["value"])  # type: ignore[arg-type]
            assert read == note
            assert encode_note(note) == data
        case "have":
            assert read == vector["rectangles"]
            rectangles = [(r[0], r[1], LayerRange(*r[2:4]), TokenRange(*r[4:6]), HeadRange(*r[6:8])) for r in vector["rectangles"]]
            assert encode_have(*ids, rectangles) == data  # type: ignore[arg-type]
        case "handshake":
            assert read == fields
            assert encode_message("hello", fields) == data  # type: ignore[arg-type]


@pytest.mark.parametrize("vector", WRONG, ids=lambda vector: vector["name"])
def test_wrong_messages_are_refused_for_the_right_reason(vector: Vector) -> None:
    with pytest.raises(WireError) as caught:
        READERS[vector["reader"]](bytes.fromhex(vector["bytes"]))
    assert caught.value.fault.value == vector["fault"]
