"""CRC32C of payloads at twice the speed of the processor's own instruction, where it multiplies 512 bits without carry (checksum.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
from crc32c import crc32c

from pddbridge.native.compiled import load
from pddbridge.native_build import NativeUnavailableError

# ``(data, value)``: of ``data`` behind a message whose checksum is ``value``; 0 for none.
Checksum = Callable[[memoryview, int], int]

NO_FOLDING: Final = "native_checksum_no_vpclmulqdq"
# Below this the package's call is the cheaper one.
_SMALLEST_BYTES: Final = 8 << 10


class NativeChecksum:
    """Any thread; others run meanwhile. Raises NativeUnavailableError, ``NO_FOLDING`` where the processor lacks what it needs."""

    def __init__(self, cache_dir: str | None) -> None:
        library = load(cache_dir)
        if not library.pdd_crc32c_folds():
            raise NativeUnavailableError(NO_FOLDING, "the processor has no AVX-512 with VPCLMULQDQ")
        self._crc32c = library.pdd_crc32c
        self._crc32c.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32)
        self._crc32c.restype = ctypes.c_uint32

    def __call__(self, data: memoryview, value: int = 0) -> int:
        """``data``: bytes in one piece."""
        if len(data) < _SMALLEST_BYTES:
            return int(crc32c(data, value))
        return int(self._crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data), value))


def fastest_checksum(cache_dir: str | None) -> tuple[Checksum, dict[str, int]]:
    """CRC32C as fast as it goes here; the package's, and why as a counted fallback, where nothing better can be compiled."""
    try:
        return NativeChecksum(cache_dir), {}
    except NativeUnavailableError as error:
        return crc32c, {error.reason: 1}
