"""The 40-byte messages beside frames: acknowledging, asking what is there, stopping, and finding out whether anyone is there at all.

One layout serves all of them; the kind says what the fields mean. A HAVE is followed by the rectangles that it announces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final

from crc32c import crc32c

from pddbridge.kv_coverage import Rectangle
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_wire import FORMAT_VERSION, MAGIC, Kind, NackReason, WireError, WireFault, checked_header

# transfer_id, epoch, sequence, value
_NOTE: Final = struct.Struct("<4sHHQQQI")
_CRC: Final = struct.Struct("<I")
_RECTANGLE: Final = struct.Struct("<HH6I")
NOTE_BYTES: Final = _NOTE.size + _CRC.size
MAX_RECTANGLES: Final = 2048


class StopReason(IntEnum):
    """Why a sender ends a transfer before it is done."""

    CANCELLED = 1
    FAILED = 2


@dataclass(frozen=True)
class Note:
    """``sequence``: of the frame that is answered, or the asker's own, echoed. ``value``: NACK its NackReason, STOP its StopReason,
    HAVE the number of rectangles, else 0.
    """

    kind: Kind
    transfer_id: int
    epoch: int
    sequence: int
    value: int = 0


def _allowed_values(kind: Kind) -> range:
    match kind:
        case Kind.NACK:
            return range(min(NackReason), max(NackReason) + 1)
        case Kind.STOP:
            return range(min(StopReason), max(StopReason) + 1)
        case Kind.HAVE:
            return range(MAX_RECTANGLES + 1)
        case _:
            return range(1)


def encode_note(note: Note) -> bytes:
    """``NOTE_BYTES`` bytes. Raises ValueError if a field does not fit."""
    try:
        packed = _NOTE.pack(MAGIC, FORMAT_VERSION, note.kind, note.transfer_id, note.epoch, note.sequence, note.value)
    except struct.error as error:
        raise ValueError(f"encode_note: {error}: {note}") from error
    return packed + _CRC.pack(crc32c(packed))


def decode_note(data: bytes | bytearray | memoryview, kinds: tuple[Kind, ...]) -> Note:
    """Read a note of one of ``kinds``. Raises WireError."""
    kind, (transfer_id, epoch, sequence, value) = checked_header(data, _NOTE, NOTE_BYTES, kinds)
    allowed = _allowed_values(kind)
    if value not in allowed:
        raise WireError(WireFault.RANGE, f"{kind.name} value: given {value}, must be in [{allowed.start}, {allowed.stop})")
    return Note(kind, transfer_id, epoch, sequence, value)


def encode_have(transfer_id: int, epoch: int, sequence: int, rectangles: Iterable[Rectangle]) -> bytes:
    """A HAVE and its body. Of more than ``MAX_RECTANGLES`` the first are told: what is not told is sent again, which does no harm."""
    told = list(islice(rectangles, MAX_RECTANGLES))
    body = b"".join(
        _RECTANGLE.pack(group, plane, layers.start, layers.stop, tokens.start, tokens.stop, heads.start, heads.stop)
        for group, plane, layers, tokens, heads in told
    )
    return encode_note(Note(Kind.HAVE, transfer_id, epoch, sequence, len(told))) + body + _CRC.pack(crc32c(body))


def have_body_bytes(note: Note) -> int:
    """Bytes that follow the header of a decoded HAVE; at most 57,348."""
    return note.value * _RECTANGLE.size + _CRC.size


def decode_have_body(data: bytes | bytearray, spec: KVSpec) -> list[Rectangle]:
    """The rectangles, each checked against ``spec``. Raises WireError."""
    body, (stated,) = memoryview(data)[: -_CRC.size], _CRC.unpack_from(data, len(data) - _CRC.size)
    if (given := crc32c(body)) != stated:
        raise WireError(WireFault.CHECKSUM, f"have body: computed {given:#010x}, stated {stated:#010x}")
    rectangles: list[Rectangle] = []
    for group, plane, l0, l1, t0, t1, h0, h1 in _RECTANGLE.iter_unpack(body):
        if group >= len(spec.groups) or plane >= len(spec.groups[group].planes):
            raise WireError(WireFault.PLANE, f"have: group {group} plane {plane} is not in the spec")
        first, num_layers = spec.groups[group].first_layer, spec.groups[group].num_layers
        if not (first <= l0 < l1 <= first + num_layers and t0 < t1 and h0 < h1 <= spec.groups[group].planes[plane].num_heads):
            raise WireError(WireFault.RANGE, f"have: layers [{l0}, {l1}) tokens [{t0}, {t1}) heads [{h0}, {h1}) are not in the spec")
        rectangles.append((group, plane, LayerRange(l0, l1), TokenRange(t0, t1), HeadRange(h0, h1)))
    return rectangles
