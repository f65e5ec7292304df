"""Objects that nothing needs any more and that only a garbage collection frees."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cycles_of(*packages: str) -> Iterator[Counter[str]]:
    """Filled at the end: objects of classes in ``packages`` that only a collection could free, by class."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        found.update(name for name in names if name.startswith(packages))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
