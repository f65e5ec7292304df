"""How a process keeps its memory: one heap from the start; once it has everything that it will keep, one that is neither given back in
parts nor walked again.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

# Of glibc's mallopt (malloc.h). The largest threshold for which it does not ask the kernel for an allocation of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES: Final = 1 << 30
_LARGE_BYTES: Final = 32 << 20


def one_heap() -> None:
    """Let all threads allocate from one heap; call it before there are any. With one each, as by default, what a step took and freed is
    kept by the thread that ran it, and as much again by the next.
    """
    _glibc("mallopt", _M_ARENA_MAX, 1)


def settle() -> None:
    """Free what starting left behind, keep what is left out of every later collection, and give no memory back from now on: what one step
    took and freed, the next one takes.

    Frameworks bring hundreds of thousands of objects. Walking them takes 150 to 400 ms, with the interpreter locked, whenever traffic has
    made a quarter as many (measured). What glibc keeps of memory that starting took and freed is hundreds of megabytes in a worker, and
    was given back after minutes or never.
    """
    gc.collect()
    gc.freeze()
    _glibc("malloc_trim", 0)
    _glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BYTES)
    _glibc("mallopt", _M_TRIM_THRESHOLD, _KEPT_BYTES)


def _glibc(name: str, *arguments: int) -> None:
    """Other C libraries do not have these, and do otherwise."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)) is not None:
        function(*arguments)
