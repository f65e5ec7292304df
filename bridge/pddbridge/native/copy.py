"""Copies of payloads into memory that another process reads next, past the caches (copy.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np

from pddbridge.native.compiled import load
from pddbridge.native_build import NativeUnavailableError

# ``(to, what)``: uint8 of one length, each in one piece.
Copy = Callable[[np.ndarray, np.ndarray], None]

# Below this the copy is still in the caches when it is read.
_SMALLEST_BYTES: Final = 256 << 10


class NativeCopy:
    """Any thread; Raises NativeUnavailableError: see :func:`pddbridge.native_build.compiled`, for ``cache_dir`` as well."""

    def __init__(self, cache_dir: str | None) -> None:
        self._copy = load(cache_dir).pdd_copy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._copy.restype = None

    def __call__(self, to: np.ndarray, what: np.ndarray) -> None:
        """Raises ValueError unless both are as :data:`Copy` says."""
        for array in (to, what):
            if array.dtype != np.uint8 or not array.flags.c_contiguous or array.shape != to.shape:
                raise ValueError(f"copy: given {array.dtype}{list(array.shape)}, must be contiguous uint8 {list(to.shape)}")
        if len(to) < _SMALLEST_BYTES:
            plain_copy(to, what)
        else:
            self._copy(to.ctypes.data, what.ctypes.data, len(to))


def plain_copy(to: np.ndarray, what: np.ndarray) -> None:
    """Through the caches."""
    to[...] = what


def fastest_copy(cache_dir: str | None) -> tuple[Copy, dict[str, int]]:
    """Past the caches; a plain one, and why as a counted fallback, where that cannot be compiled."""
    try:
        return NativeCopy(cache_dir), {}
    except NativeUnavailableError as error:
        return plain_copy, {error.reason: 1}
