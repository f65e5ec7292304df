"""What must be decided before jax is imported: which platforms it may open, and how many threads XLA:CPU computes with, as the pool is
sized when the CPU client is made.
"""

from __future__ import annotations

import os
from pathlib import Path

# XLA names its pool so; Linux shows the name of every thread.
_POOL_THREAD = "tf_XLAEigen"


def environment(num_threads: int, device: str = "cpu", num_devices: int = 1, spin: bool = False) -> dict[str, str]:
    """Environment variables that a composition root sets before it imports jax, so that XLA:CPU computes with ``num_threads`` threads.

    An engine on ``device`` "cpu" opens no other platform: where libtpu is installed, as it is to compile for TPUs that are not here, JAX
    would otherwise look for a TPU, and processes beside one another would wait for its lock. Other devices leave the choice to JAX. More
    than one CPU device (``num_devices``) are virtual: they show that a split engine is right, not that it is fast.

    PJRT's CPU client sizes its pool by ``PJRT_NPROC``, then ``NPROC``, then CPU affinity (xla/pjrt/utils.cc, DefaultThreadPoolSize; checked
    by measuring CPU time per thread with jaxlib 0.10.2). What idle threads do is that pool's own choice, whatever ``spin`` says. Raises
    ValueError for less than one thread.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: given {num_threads}, allowed 1 or more")
    threads = {"PJRT_NPROC": str(num_threads)}
    if device != "cpu":
        return threads
    devices = {"JAX_NUM_CPU_DEVICES": str(num_devices)} if num_devices > 1 else {}
    return threads | {"JAX_PLATFORMS": "cpu"} | devices


def pool_size() -> int | None:
    """Threads in the XLA:CPU pool of this process; None where threads cannot be listed or no client has been made yet."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    if not tasks.is_dir():
        return None
    names = []
    for task in tasks.iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue  # the thread ended while we looked
    return names.count(_POOL_THREAD) or None
