"""Slots of a link's memory that are lent to whoever makes a block, so that it is made where the receiver reads it and copied by nobody."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

# ``(num_bytes, shared)``: memory for blocks of one read, uint8 [num_bytes], or None: make them elsewhere. ``shared``: transfers over other
# links will send the same blocks. May be called by one thread, which need not be the link's.
Lend: TypeAlias = Callable[[int, bool], "np.ndarray | None"]

NOT_CONNECTED: Final = "no connection stands"
TOO_LARGE: Final = "the blocks are larger than a slot"
NONE_FREE: Final = "no slot is free"
KEPT: Final = "the free slots are kept for blocks that go over this link alone"
# Of the slots, so many stay free of blocks that another link sends too: a slow one could hold them for seconds.
_KEPT_PART: Final = 3


class SlotLoans:
    """``slots``: the memory of each, in twos as :mod:`pddbridge.links.slots` says. A slot is free again when no array refers to it any
    more. So it comes back whatever happens: when the block was never made, when its request was dropped, or once every transfer that owes
    it, over whatever link, has ended or let go of it and the connection, which keeps what it announced, was told that nobody reads it.

    ``take`` is for one thread; slots come back from any.
    """

    def __init__(self, slots: Sequence[memoryview]) -> None:
        self._slots = slots
        # Appended to and popped from by several threads, each step of it atomic. The one that came back last is the next: it is warm.
        self._free = deque(range(len(slots)))
        self._num_kept = len(slots) // _KEPT_PART

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def any_out(self) -> bool:
        """Whether something is lent. Of a block that exists: whether it may lie in such memory."""
        return len(self._free) < len(self._slots)

    def take(self, num_bytes: int, shared: bool) -> np.ndarray | str:
        """uint8 [num_bytes] of a slot's memory, or why not."""
        if self._slots and num_bytes > len(self._slots[0]):
            return TOO_LARGE
        if shared and len(self._free) <= self._num_kept:
            return KEPT if self._free else NONE_FREE
        try:
            slot = self._free.pop()
        except IndexError:
            return NONE_FREE
        whole = np.frombuffer(self._slots[slot], np.uint8)
        # Every array made from this one refers to it, so it ends after the last of them.
        weakref.finalize(whole, self._free.append, slot).atexit = False
        return whole[:num_bytes]


class Lender:
    """What a sender lends of the connection that stands, and how often it could not, by reason."""

    def __init__(self) -> None:
        self.loans: SlotLoans | None = None
        # Every reason from the start: a dict that does not grow may be read by another thread.
        self.refused = Counter(dict.fromkeys((NOT_CONNECTED, TOO_LARGE, NONE_FREE, KEPT), 0))

    def lend(self, num_bytes: int, shared: bool) -> np.ndarray | None:
        """See :data:`Lend`."""
        loans = self.loans
        taken = NOT_CONNECTED if loans is None else loans.take(num_bytes, shared)
        if isinstance(taken, str):
            self.refused[taken] += 1
            return None
        return taken
