"""The environment of a worker process that runs this engine on a CPU. Imports no torch: all of this is read when a process starts or
first imports it.
"""

from __future__ import annotations

_MIB = 1 << 20


def environment(num_threads: int) -> dict[str, str]:
    """Variables to start a process with: ``num_threads`` for OpenMP and MKL, idle threads that sleep, and memory that stays mapped.

    By default OpenMP's threads spin between parallel regions, so three workers on two cores slow one another down many times over even
    when two of them have nothing to do. The price: waking a thread for every product makes two threads no faster than one for decode steps
    of a small model (prefill chunks gain 1.5 times and more), so a worker that mostly decodes is best given one. And glibc gives large blocks back to the kernel when they are freed, so that each layer faults its
    temporaries in again (measured: gathering 2,000 tokens takes up to four times as long); huge pages make reading weights 8 % faster.
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: given {num_threads}, allowed 1 or more")
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "MALLOC_MMAP_THRESHOLD_": str(32 * _MIB),  # the largest that glibc accepts
        "MALLOC_TRIM_THRESHOLD_": str(1024 * _MIB),
        "THP_MEM_ALLOC_ENABLE": "1",
    }
