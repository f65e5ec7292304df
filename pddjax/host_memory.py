"""Host memory for weights: on huge pages where the system has them, as a processor's prefetchers stop at the end of a page."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np

_HUGE: Final = 1 << 21
_LINE: Final = 64  # XLA:CPU takes arrays that begin on a cache line as they are


def together(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Copies of ``arrays``, side by side. Freed when the last of them is."""
    sizes = [-(-array.nbytes // _LINE) * _LINE for array in arrays]
    memory = mmap.mmap(-1, sum(sizes) + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    at = -whole.ctypes.data % _HUGE
    copies = []
    for array, size in zip(arrays, sizes, strict=True):
        copy = whole[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies.append(copy)
        at += size
    return copies
