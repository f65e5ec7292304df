"""Memory that frames are received into, used again while it is still in the caches and in the page tables."""

from __future__ import annotations

import sys
from typing import Final

import numpy as np

from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES

# Below this the allocator gives memory that is mapped already.
_SMALLEST_BYTES: Final = 64 << 10
_MAX_BUFFERS: Final = 16
# Of a buffer that nobody uses: the list, the loop's variable, the argument of getrefcount.
_FREE_REFERENCES: Final = 3


class FrameBuffers:
    """At most 64 MiB are kept, of which as much is memory as frames were large. A buffer is free when no array refers to it any more:
    whoever places a block may keep its values.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> np.ndarray:
        """Uninitialised uint8 [num_bytes], at most a frame's. The one used first is tried first: its memory is the warmest."""
        if num_bytes < _SMALLEST_BYTES:
            return np.empty(num_bytes, np.uint8)
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == _FREE_REFERENCES:
                return buffer[:num_bytes]
        if len(self._buffers) == _MAX_BUFFERS:
            return np.empty(num_bytes, np.uint8)
        self._buffers.append(np.empty(LARGEST_PAYLOAD_BYTES, np.uint8))
        return self._buffers[-1][:num_bytes]
