"""Units moved between pages and wire by one call for all of a conversion: past the caches where they would only be in the way."""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from pddbridge.native.compiled import load
from pddbridge.native_build import NativeUnavailableError

# As in moves.cpp.
MOVE: Final = np.dtype(
    [
        *(("first_layer", np.int64), ("num_layers", np.int64), ("places", np.int64), ("offset", np.int64)),
        *(("wire", np.int64), ("layer_bytes", np.int64), ("which", np.int64), ("num", np.int64), ("unit_bytes", np.int64)),
    ]
)
# What goes past the caches, from so many bytes on. To the wire: memory that was there is in no cache, or in another core's (a slot that a
# receiver has read). Fresh memory was zeroed a moment ago and is in them, unless a conversion is too large to find its own beginning there.
_STREAMED_READ_BYTES: Final = 1 << 20
_STREAMED_FRESH_BYTES: Final = 16 << 20
# Pages are read again by attention, among so many others that they are in no cache by then.
_STREAMED_WRITE_BYTES: Final = 64 << 10


class NativeMoves:
    """Any thread. Raises NativeUnavailableError: see :func:`pddbridge.native_build.compiled`, also for ``cache_dir``."""

    def __init__(self, cache_dir: str | None) -> None:
        self._moves = load(cache_dir).pdd_moves
        self._moves.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._moves.restype = None

    def make(self, moves: np.ndarray, num_bytes: int, *, to_wire: bool, fresh: bool = False) -> None:
        """``moves`` [N] of ``MOVE``, contiguous, ``num_bytes`` in all: what they point to is checked and kept by the caller. ``fresh``:
        they go into memory that was allocated for them.
        """
        threshold = _STREAMED_WRITE_BYTES if not to_wire else _STREAMED_FRESH_BYTES if fresh else _STREAMED_READ_BYTES
        self._moves(moves.ctypes.data, len(moves), to_wire, num_bytes >= threshold)


def native_moves(cache_dir: str | None) -> tuple[NativeMoves | None, dict[str, int]]:
    """For a :class:`pddbridge.kv_pool.KVPool`. None, and why as a counted fallback, where they cannot be compiled."""
    try:
        return NativeMoves(cache_dir), {}
    except NativeUnavailableError as error:
        return None, {error.reason: 1}
