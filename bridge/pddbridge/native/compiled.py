"""This package's C++, compiled on first use and loaded once per process."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from pddbridge.native_build import compiled


@functools.cache
def load(cache_dir: str | None) -> ctypes.CDLL:
    """Raises NativeUnavailableError: see :func:`pddbridge.native_build.compiled`, also for ``cache_dir``."""
    return compiled("bridge", Path(__file__).parent, (), cache_dir)
