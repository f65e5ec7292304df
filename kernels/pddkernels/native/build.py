"""The library of this package: see :mod:`pddbridge.native_build`, which compiles it on first use in about 6 s. Imports no framework.

It is linked to the OpenMP runtime by the name that PyTorch's copy carries, so that both use one pool of threads: import torch first.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

from pddbridge import native_build
from pddbridge.native_build import NO_COMPILER, NOT_COMPILED, NativeUnavailableError

__all__ = ["NOT_COMPILED", "NO_COMPILER", "NativeUnavailableError", "compiled", "load"]

_HERE: Final = Path(__file__).parent


@functools.cache
def load(cache_dir: str | None) -> ctypes.CDLL:
    """The library of this package. See :func:`compiled`."""
    return compiled("native", _HERE, ("-fopenmp",), cache_dir)


def compiled(name: str, sources: Path, flags: tuple[str, ...], cache_dir: str | None) -> ctypes.CDLL:
    """As :func:`pddbridge.native_build.compiled`; the files of ``sources`` may include this package's headers."""
    return native_build.compiled(name, sources, flags, cache_dir, headers=_HERE)
