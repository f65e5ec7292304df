"""The environment of a worker process that runs this engine on a CPU. Imports no torch: all of it is read when torch is first imported."""

from __future__ import annotations


def environment(num_threads: int, device: str = "cpu", num_devices: int = 1) -> dict[str, str]:
    """Variables to set before torch is imported: ``num_threads`` for OpenMP and MKL, idle threads that sleep, huge pages for large tensors.
    They are the same for every ``device`` and number of them: what an engine on a GPU computes on the host goes through the same pools.

    By default OpenMP's threads spin between parallel regions, so three workers on two cores slow one another down many times over even
    when two of them have nothing to do. The price: a thread is woken for every product, so two threads are no faster than one for the
    decode steps of a small model (prefill chunks gain half and more), and a worker that mostly decodes is best given one.
    Huge pages make reading weights 8 % faster (measured).
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: given {num_threads}, allowed 1 or more")
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
