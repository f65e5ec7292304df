"""How long work takes on a device: CUDA events around each of several calls, caches cold; a clock on a CPU, where this is only tried."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

_FLUSH_BYTES: Final = 256 << 20  # beyond every GPU's L2
# The device spins this long first, so that the host has queued all calls before it comes to them: launches cost no time between events.
_HEAD_START_CYCLES: Final = 40_000_000


@dataclass(frozen=True)
class Timing:
    """``median_s`` of the calls, and the shortest."""

    median_s: float
    best_s: float


def time_calls(run: Callable[[], object], device: torch.device, rounds: int) -> Timing:
    """Time ``rounds`` calls of ``run`` after two that are not counted."""
    run()
    run()
    seconds = _on_gpu(run, device, rounds) if device.type == "cuda" else _on_cpu(run, rounds)
    return Timing(statistics.median(seconds), min(seconds))


def _on_gpu(run: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    for start, end in events:
        flushed.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _on_cpu(run: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds
