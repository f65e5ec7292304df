"""The memory that sender and receiver of one host share: an anonymous file, passed as a descriptor, cut into slots of one frame each.

It has no name, so nothing is left behind however either process ends: the kernel frees it with the last mapping. It is sealed against
resizing, so a peer cannot take pages away from under a reader. The sender alone writes and decides which slot is free; a slot is free again
once its frame was answered, never earlier. Into some slots frames are copied; the others are lent, in twos, and blocks are made there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Final

import numpy as np

from pddbridge.links.slot_loans import SlotLoans
from pddbridge.links.slots import LOAN_BYTES, MAX_SLOTS, SLOT_BYTES, SLOTS_OF_A_LOAN, FreeSlots
from pddbridge.native.copy import Copy, plain_copy

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """The sender's end: ``num_slots`` to ``copy`` frames into, and ``num_loans`` of LOAN_BYTES. ``fd`` stays open until ``close_fd``, the
    memory as long as somebody maps it.

    Raises ValueError for a size out of bounds, OSError when there is no memory.
    """

    def __init__(self, num_slots: int, num_loans: int = 0, copy: Copy = plain_copy) -> None:
        self._copy = copy
        self.free = FreeSlots(num_slots)
        num_all = num_slots + num_loans * SLOTS_OF_A_LOAN
        if num_all > MAX_SLOTS:
            raise ValueError(f"Arena: {num_all} slots, at most {MAX_SLOTS} are allowed")
        self.fd = os.memfd_create("pdd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_all * SLOT_BYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        mapped = memoryview(mmap.mmap(self.fd, num_all * SLOT_BYTES))
        memory = np.frombuffer(mapped, np.uint8)
        self._slots = memory.reshape(num_all, SLOT_BYTES)
        self._address, self._num_bytes = memory.ctypes.data, len(memory)
        starts = range(num_slots * SLOT_BYTES, num_all * SLOT_BYTES, LOAN_BYTES)
        self.loans = SlotLoans([mapped[start : start + LOAN_BYTES] for start in starts])

    def close_fd(self) -> None:
        """The receiver has its own descriptor by now. Closed with the arena at the latest."""
        self._close_fd()

    def write(self, slot: int, payload: memoryview) -> int:
        """Copy ``payload``, at most SLOT_BYTES, into a taken ``slot``; returns its offset in the arena."""
        self._copy(self._slots[slot, : len(payload)], np.frombuffer(payload, np.uint8))
        return slot * SLOT_BYTES

    def offset_of(self, payload: memoryview) -> int | None:
        """Where in the arena ``payload`` lies; None if it lies elsewhere."""
        offset = np.frombuffer(payload, np.uint8).ctypes.data - self._address
        return offset if 0 <= offset <= self._num_bytes - len(payload) else None


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
