"""The environment of a worker process that runs this engine on a CPU. Imports no torch: OpenMP reads it when torch is first imported."""

from __future__ import annotations


def environment(num_threads: int) -> dict[str, str]:
    """Variables to start a process with: ``num_threads`` for OpenMP and MKL, and idle threads that sleep.

    By default OpenMP's threads spin between parallel regions, so three workers on two cores slow one another down many times over even
    when two of them have nothing to do.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: given {num_threads}, allowed 1 or more")
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
