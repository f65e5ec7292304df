"""What this machine gives a PyTorch process at best: the ceilings that engine figures are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

_READ_BYTES = 1 << 29  # beyond every cache
_SIDE = 2048
_ROUNDS = 5


def measure() -> tuple[float, dict[str, float]]:
    """(bytes read per second by a sum over 512 MiB, floating-point operations per second of square products by dtype name).

    Best of a few rounds, with the threads this process has.
    """
    data = torch.ones(_READ_BYTES // 4)
    seconds = _best(data.sum)
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(_SIDE, _SIDE).to(dtype) for _ in range(2))
        flops[str(dtype).removeprefix("torch.")] = 2 * _SIDE**3 / _best(partial(torch.matmul, a, b))
    return _READ_BYTES / seconds, flops


def _best(run: Callable[[], object]) -> float:
    run()
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
