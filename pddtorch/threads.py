"""The environment of a worker process that runs this engine on a CPU. Imports no torch: all of it is read when torch is first imported."""

from __future__ import annotations


def environment(num_threads: int, device: str = "cpu", num_devices: int = 1, spin: bool = False) -> dict[str, str]:
    """Variables to set before torch is imported: ``num_threads`` for OpenMP and MKL, what idle threads do, huge pages for large tensors.
    They are the same for every ``device`` and number of them: what an engine on a GPU computes on the host goes through the same pools.

    Between parallel regions a thread sleeps, or with ``spin`` looks out for the next one for some milliseconds before it does. A step has
    some 200 regions. A worker whose cores are its own gains by spinning (SmolLM2, bfloat16, two threads: 75 tokens per second instead of 11
    to 26, where sleepers must be woken on a busy machine); workers that share cores slow one another down many times over by it, even when
    all but one have nothing to do, and are best given one thread each, which has nobody to wait for.
    Huge pages make reading weights 8 % faster (measured).
    """
    if num_threads < 1:
        raise ValueError(f"num_threads: given {num_threads}, allowed 1 or more")
    # Without a policy GNU's runtime spins for 300,000 rounds where threads have cores, 1,000 where not, and then sleeps.
    idle = {"KMP_BLOCKTIME": "5"} if spin else {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    return {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads), "THP_MEM_ALLOC_ENABLE": "1", **idle}
