"""What the two ends of a slot link agree on: the size of a slot, and messages of one size."""

from __future__ import annotations

import struct
from typing import Final

from pddbridge.kv_notes import NOTE_BYTES, Note, encode_note
from pddbridge.kv_wire import FRAME_HEADER_BYTES

# Larger than a frame on a wire: what a frame costs beside its copy, at both ends, is worth a mebibyte's copying and more.
SLOT_BYTES: Final = 8 << 20
MAX_SLOTS: Final = 64
# What is lent at once, for all planes of a read: K and V then fill a frame each, and half as many frames cost half as much.
SLOTS_OF_A_LOAN: Final = 2
LOAN_BYTES: Final = SLOTS_OF_A_LOAN * SLOT_BYTES
# A sender's message is a frame's header, then where its payload lies in the memory; or a note, filled up with zeros.
_OFFSET: Final = struct.Struct("<Q")
MESSAGE_BYTES: Final = FRAME_HEADER_BYTES + _OFFSET.size


def announce(header: bytes, offset: int) -> bytes:
    """A frame's message, from its encoded header."""
    return header + _OFFSET.pack(offset)


def announced_offset(message: bytes) -> int:
    """As sent: not checked against anything."""
    (offset,) = _OFFSET.unpack_from(message, FRAME_HEADER_BYTES)
    return int(offset)


def note_message(note: Note) -> bytes:
    """A note's message; its first NOTE_BYTES are the note."""
    assert NOTE_BYTES <= MESSAGE_BYTES
    return encode_note(note).ljust(MESSAGE_BYTES, b"\0")


class FreeSlots:
    """Which slots of a sender are free. The one that was freed last is used next: its lines are still in the cache."""

    def __init__(self, num_slots: int) -> None:
        if not 0 < num_slots <= MAX_SLOTS:
            raise ValueError(f"num_slots: given {num_slots}, must be in [1, {MAX_SLOTS}]")
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot; there is one."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} given back twice"
        self._free.append(slot)
