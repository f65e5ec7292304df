"""Copies of payloads into memory that another process reads next, past the caches (copy.cpp)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

import numpy as np

from pddbridge.native.compiled import load
from pddbridge.native_build import NativeUnavailableError

# ``(to, what)``: uint8 of one length, each in one piece.
Copy = Callable[[np.ndarray, np.ndarray], None]

# Below this the copy is still in the caches when it is read.
_SMALLEST_BYTES: Final = 256 << 10
# Below this one thread is done before another has been awakened.
_SMALLEST_SHARED_BYTES: Final = 1 << 20
# One core fills memory at half its rate, two at nearly all of it.
_MOST_THREADS: Final = 2


def default_threads() -> int:
    """As many as there are cores for this process, up to two."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class NativeCopy:
    """For any thread, alone or with ``num_threads - 1`` others (None: see :func:`default_threads`). These sleep between copies and are the
    process's: two copies at once share none. Raises ValueError for fewer than one, NativeUnavailableError as
    :func:`pddbridge.native_build.compiled`, which says what ``cache_dir`` is.
    """

    def __init__(self, cache_dir: str | None, num_threads: int | None = None) -> None:
        self._num_threads = default_threads() if num_threads is None else num_threads
        if self._num_threads < 1:
            raise ValueError(f"num_threads: given {num_threads}, must be 1 or more")
        self._copy = load(cache_dir).pdd_copy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._copy.restype = None

    def __call__(self, to: np.ndarray, what: np.ndarray) -> None:
        """Raises ValueError unless both are as :data:`Copy` says."""
        for array in (to, what):
            if array.dtype != np.uint8 or not array.flags.c_contiguous or array.shape != to.shape:
                raise ValueError(f"copy: given {array.dtype}{list(array.shape)}, must be contiguous uint8 {list(to.shape)}")
        if len(to) < _SMALLEST_BYTES:
            plain_copy(to, what)
        else:
            self._copy(to.ctypes.data, what.ctypes.data, len(to), self._num_threads if len(to) >= _SMALLEST_SHARED_BYTES else 1)


def plain_copy(to: np.ndarray, what: np.ndarray) -> None:
    """Through the caches."""
    to[...] = what


def fastest_copy(cache_dir: str | None, num_threads: int | None = None) -> tuple[Copy, dict[str, int]]:
    """Past the caches, by ``num_threads`` as :class:`NativeCopy` says; a plain one, and why as a counted fallback, where that cannot be
    compiled.
    """
    try:
        return NativeCopy(cache_dir, num_threads), {}
    except NativeUnavailableError as error:
        return plain_copy, {error.reason: 1}
