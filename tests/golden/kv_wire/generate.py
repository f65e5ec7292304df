"""Writes the golden messages of the KV wire format, version 1: `python tests/golden/kv_wire/generate.py` rewrites messages.json beside it.

Pinned: it knows the format from the text of bridge/README.md alone, imports nothing of this repository, and puts every message together
byte by byte, with a CRC32C taken bit by bit from the polynomial. A change of what it writes is a change of the format, which needs another
version. Each vector names the fields that a reader must find, or the fault for which it must be refused.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

FILE = Path(__file__).with_name("messages.json")

# Layers 0 and 1: k and v, 3 heads of 2. Layer 2: one latent of 4 in float32. The spec's dtype is bfloat16.
SPEC = {
    "dtype": "bfloat16",
    "groups": [
        {"first_layer": 0, "num_layers": 2, "planes": [["k", 3, 2, None], ["v", 3, 2, None]]},
        {"first_layer": 2, "num_layers": 1, "planes": [["latent", 1, 4, "float32"]]},
    ],
}
TRANSFER, EPOCH, SEQUENCE = 0x8000000000000005, 0xFFFFFFFFFFFFFFFF, 0x100000001


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def le(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def sealed(header: bytes) -> bytes:
    return header + le(crc32c(header), 4)


def bfloat16(values: list[float]) -> bytes:
    """Of values that bfloat16 holds exactly: the upper half of their float32."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def prefix(kind: int, magic: bytes = b"PDDK", version: int = 1) -> bytes:
    return magic + le(version, 2) + le(kind, 2)


FRAME_FIELDS = {
    "transfer_id": (TRANSFER, 8),
    "epoch": (EPOCH, 8),
    "sequence": (SEQUENCE, 8),
    "group": (0, 2),
    "plane": (1, 2),
    "layer_start": (0, 4),
    "layer_stop": (2, 4),
    "token_start": (100, 4),
    "token_stop": (101, 4),
    "head_start": (0, 4),
    "head_stop": (3, 4),
    "codec": (0, 1),
    "dtype": (2, 1),
    "reserved": (0, 2),
}


def frame(payload: bytes, size: int | None = None, crc: int | None = None, kind: int = 16, **changes: int) -> bytes:
    values = {name: changes.get(name, value) for name, (value, _) in FRAME_FIELDS.items()}
    header = prefix(kind) + b"".join(le(values[name], width) for name, (_, width) in FRAME_FIELDS.items())
    header += le(crc32c(payload) if crc is None else crc, 4) + le(len(payload) if size is None else size, 8)
    return sealed(header) + payload


def note(kind: int, value: int = 0, transfer_id: int = TRANSFER, sequence: int = SEQUENCE) -> bytes:
    return sealed(prefix(kind) + le(transfer_id, 8) + le(EPOCH, 8) + le(sequence, 8) + le(value, 4))


def have(rectangles: list[list[int]], count: int | None = None, body_crc: int | None = None) -> bytes:
    body = b"".join(le(r[0], 2) + le(r[1], 2) + b"".join(le(n, 4) for n in r[2:]) for r in rectangles)
    return note(20, len(rectangles) if count is None else count) + body + le(crc32c(body) if body_crc is None else body_crc, 4)


def handshake(kind: int, body: bytes, size: int | None = None, crc: int | None = None) -> bytes:
    return sealed(prefix(kind) + le(len(body) if size is None else size, 4) + le(crc32c(body) if crc is None else crc, 4)) + body


def good() -> list[dict[str, object]]:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1.0, -2.0, -3.0, -4.0, 0.5, 384.0]
    latent = struct.pack("<4f", 1.5, -0.0, 3.0, 1e-3)
    common = {"transfer_id": TRANSFER, "epoch": EPOCH, "sequence": SEQUENCE}
    rectangles = [[0, 0, 0, 2, 100, 103, 0, 3], [1, 0, 2, 3, 0, 1, 0, 1]]
    body = json.dumps({"a": "1", "b": "é"}, sort_keys=True, separators=(",", ":")).encode("ascii")
    return [
        {
            "name": "frame of plane v, layers 0 and 1, token 100",
            "reader": "frame",
            "bytes": frame(bfloat16(values)).hex(),
            "fields": {**common, "group": 0, "plane": 1, "layers": [0, 2], "tokens": [100, 101], "heads": [0, 3], "dtype": "bfloat16"},
            "values": values,
        },
        {
            "name": "frame of the second group, a plane with its own dtype",
            "reader": "frame",
            "bytes": frame(latent, group=1, plane=0, layer_start=2, layer_stop=3, head_stop=1, dtype=1).hex(),
            "fields": {**common, "group": 1, "plane": 0, "layers": [2, 3], "tokens": [100, 101], "heads": [0, 1], "dtype": "float32"},
            "values": list(struct.unpack("<4f", latent)),
        },
        {"name": "ack", "reader": "note", "bytes": note(17).hex(), "fields": {**common, "kind": 17, "value": 0}},
        *(
            {"name": f"nack {reason}", "reader": "note", "bytes": note(18, reason).hex(), "fields": {**common, "kind": 18, "value": reason}}
            for reason in range(1, 6)
        ),
        {"name": "ask", "reader": "note", "bytes": note(19).hex(), "fields": {**common, "kind": 19, "value": 0}},
        {
            "name": "have",
            "reader": "have",
            "bytes": have(rectangles).hex(),
            "fields": {**common, "kind": 20, "value": 2},
            "rectangles": rectangles,
        },
        {"name": "have nothing", "reader": "have", "bytes": have([]).hex(), "fields": {**common, "kind": 20, "value": 0}, "rectangles": []},
        {"name": "stop, cancelled", "reader": "note", "bytes": note(21, 1).hex(), "fields": {**common, "kind": 21, "value": 1}},
        {"name": "stop, failed", "reader": "note", "bytes": note(21, 2).hex(), "fields": {**common, "kind": 21, "value": 2}},
        {"name": "ping", "reader": "note", "bytes": note(22, 0, 0).hex(), "fields": {**common, "transfer_id": 0, "kind": 22, "value": 0}},
        {"name": "pong", "reader": "note", "bytes": note(23, 0, 0).hex(), "fields": {**common, "transfer_id": 0, "kind": 23, "value": 0}},
        {"name": "hello with a body", "reader": "handshake", "bytes": handshake(1, body).hex(), "fields": {"a": "1", "b": "é"}},
    ]


def wrong() -> list[dict[str, object]]:
    payload = bytes(24)
    flipped = bytearray(frame(payload))
    flipped[90] ^= 4
    header = bytearray(frame(payload))
    header[45] ^= 1
    foreign = sealed(prefix(17, magic=b"PDDL") + bytes(28))
    later = sealed(prefix(17, version=2) + bytes(28))
    rectangle = [0, 0, 0, 2, 100, 103, 0, 3]

    def vector(name: str, reader: str, data: bytes | bytearray, fault: str) -> dict[str, object]:
        return {"name": name, "reader": reader, "bytes": bytes(data).hex(), "fault": fault}

    return [
        vector("another magic", "note", foreign, "magic"),
        vector("a later version", "note", later, "version"),
        vector("a kind that nobody knows", "note", note(99), "kind"),
        vector("a frame's kind on a note", "note", note(16), "kind"),
        vector("a flipped bit in the header", "frame", header, "checksum"),
        vector("a flipped bit in the payload", "frame", flipped, "checksum"),
        vector("reserved bits", "frame", frame(payload, reserved=1), "reserved"),
        vector("an unknown codec", "frame", frame(payload, codec=200), "codec"),
        vector("another dtype than the plane's", "frame", frame(payload, dtype=3), "dtype"),
        vector("a dtype that nobody knows", "frame", frame(payload, dtype=77), "dtype"),
        vector("no such group", "frame", frame(payload, group=2), "plane"),
        vector("no such plane", "frame", frame(payload, plane=2), "plane"),
        vector("layers of the next group", "frame", frame(payload, layer_stop=3), "range"),
        vector("an empty range", "frame", frame(payload, token_start=101), "range"),
        vector("a range backwards", "frame", frame(payload, token_start=102), "range"),
        vector("heads beyond the plane's", "frame", frame(payload, head_stop=4), "range"),
        vector("a start of 2^32-1", "frame", frame(payload, layer_start=2**32 - 1), "range"),
        vector("no payload", "frame", frame(b"", size=0), "size"),
        vector("a payload of one byte more", "frame", frame(payload, size=25), "size"),
        vector("a payload of 2^63", "frame", frame(payload, size=2**63), "size"),
        vector("a payload of 2^64-24", "frame", frame(payload, size=2**64 - 24), "size"),
        vector("ranges whose product needs 65 bits", "frame", frame(payload, token_start=0, token_stop=2**32 - 1), "size"),
        vector("consistent and too large", "frame", frame(payload, token_start=0, token_stop=2**20, size=2**20 * 24), "size"),
        vector(
            "a product that is right in 32 bits only",
            "frame",
            frame(payload, token_start=0, token_stop=2**29, size=2**29 * 24 % 2**32),
            "size",
        ),
        vector("an ack with a reason", "note", note(17, 1), "range"),
        vector("a nack without a reason", "note", note(18, 0), "range"),
        vector("a nack with a reason that nobody knows", "note", note(18, 6), "range"),
        vector("a stop without a reason", "note", note(21, 0), "range"),
        vector("a ping with a value", "note", note(22, 1), "range"),
        vector("a note that is cut", "note", note(17)[:-1], "truncated"),
        vector("a note with a wrong checksum", "note", note(17)[:-1] + b"\0", "checksum"),
        vector("more rectangles than are allowed", "have", have([rectangle], count=2049), "range"),
        vector("2^32-1 rectangles", "have", have([rectangle], count=2**32 - 1), "range"),
        vector("a rectangle of no plane", "have", have([[0, 2, *rectangle[2:]]]), "plane"),
        vector("a rectangle beyond its group", "have", have([[0, 0, 0, 3, *rectangle[4:]]]), "range"),
        vector("an empty rectangle", "have", have([[0, 0, 0, 2, 5, 5, 0, 3]]), "range"),
        vector("rectangles with a wrong checksum", "have", have([rectangle], body_crc=1), "checksum"),
        vector("a body that is no JSON", "handshake", handshake(1, b"{"), "body"),
        vector("a body with a number", "handshake", handshake(1, b'{"a":1}'), "body"),
        vector("a pickle as body", "handshake", handshake(1, b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94."), "body"),
        vector("a body that is announced too large", "handshake", handshake(1, b"{}", size=65537), "size"),
        vector("a body with a wrong checksum", "handshake", handshake(1, b"{}", crc=5), "checksum"),
    ]


def document() -> str:
    return json.dumps({"format_version": 1, "spec": SPEC, "good": good(), "wrong": wrong()}, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
