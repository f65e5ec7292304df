"""What is importable here, and stand-ins for two packages that frames of KV import: CRC-32C, which every frame carries, is computed in
Python; zstd, which no frame here uses, is a module without anything in it, so that using it fails.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli's, reflected (RFC 3720, appendix B.4)


def missing(packages: Sequence[str]) -> list[str]:
    """Those that this Python cannot import; what has a stand-in counts as there."""
    return [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]


def provide() -> list[str]:
    """Put stand-ins in place where the packages are absent, and say so."""
    notes = []
    for name in missing(["crc32c", "zstandard"]):
        sys.modules[name] = ModuleType(name)
        if name == "crc32c":
            sys.modules[name].crc32c = crc32c  # type: ignore[attr-defined]
            notes.append("crc32c is not installed: checksums of frames come from a table in Python, the same values, slowly")
        else:
            notes.append("zstandard is not installed: frames are raw, as all are here")
    return notes


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """As the package's: CRC-32C of ``data``, continued from ``value``."""
    table = _table()
    crc = value ^ 0xFFFFFFFF
    for byte in bytes(data):
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    def entry(byte: int) -> int:
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        return byte

    return tuple(entry(byte) for byte in range(256))
