"""The memory that sender and receiver of one host share: an anonymous file, passed as a descriptor, cut into slots of one frame each.

It has no name, so nothing is left behind however either process ends: the kernel frees it with the last mapping. It is sealed against
resizing, so a peer cannot take pages away from under a reader. The sender alone writes and decides which slot is free; a slot is free again
once its frame was answered, never earlier.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np

from pddbridge.links.slots import MAX_SLOTS, SLOT_BYTES, FreeSlots

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """The sender's end, ``num_slots`` large. ``fd`` stays open until ``close_fd``; the memory lives as long as somebody maps it.

    Raises ValueError for a size out of bounds, OSError when there is no memory.
    """

    def __init__(self, num_slots: int) -> None:
        self.free = FreeSlots(num_slots)
        self.fd = os.memfd_create("pdd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_slots * SLOT_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(self.fd, num_slots * SLOT_BYTES)
        except OSError:
            os.close(self.fd)
            raise
        self._slots = np.frombuffer(mapped, np.uint8).reshape(num_slots, SLOT_BYTES)

    def close_fd(self) -> None:
        """The receiver has its own descriptor by now."""
        os.close(self.fd)

    def write(self, slot: int, payload: memoryview) -> int:
        """Copy ``payload``, at most SLOT_BYTES, into a taken ``slot``; returns its offset in the arena."""
        self._slots[slot, : len(payload)] = np.frombuffer(payload, np.uint8)
        return slot * SLOT_BYTES


def map_arena(fd: int) -> np.ndarray:
    """The receiver's end: all bytes of the arena behind ``fd``, which is closed. Raises ValueError for any other descriptor."""
    try:
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError as error:
            raise ValueError(f"arena: the descriptor is no sealed memory: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise ValueError(f"arena: seals are {seals:#x}, at least {_SEALS:#x} are needed")
        if not (0 < size <= MAX_SLOTS * SLOT_BYTES and size % SLOT_BYTES == 0):
            raise ValueError(f"arena: {size} bytes, must be 1 to {MAX_SLOTS} times {SLOT_BYTES}")
        return np.frombuffer(mmap.mmap(fd, size), np.uint8)
    finally:
        os.close(fd)
