"""Which of the host's cores a worker computes on. Workers that share a host can each have their own that way, as chips would be."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection


def compute_on(cpus: Collection[int]) -> None:
    """The calling thread, and whatever threads it starts from now on, run on ``cpus`` only (numbers as Linux counts them).

    Raises ValueError for one that this process may not use, or where threads cannot be bound.
    """
    if sys.platform != "linux":
        raise ValueError(f"cpus: given {sorted(cpus)}, allowed only on Linux, this is {sys.platform}")
    allowed = os.sched_getaffinity(0)
    if not set(cpus) <= allowed:
        raise ValueError(f"cpus: given {sorted(cpus)}, allowed here {sorted(allowed)}")
    os.sched_setaffinity(0, cpus)
