"""What the device gives at best, measured beside whatever is held against it: copy bandwidth and the rate of bfloat16 products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Finding
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.timing import time_calls
from pddkernels.targets.work import Work


@dataclass(frozen=True)
class Limits:
    """``bytes_s``: of a device-to-device copy, read and written bytes · ``flops_s``: of square bfloat16 products of random values."""

    bytes_s: float
    flops_s: float

    def seconds(self, work: Work) -> float:
        """The least that ``work`` takes at these rates: the roofline (doi:10.1145/1498765.1498785)."""
        return max(work.flops / self.flops_s, work.num_bytes / self.bytes_s)

    def numbers(self, work: Work, seconds: float) -> dict[str, float]:
        """What ``work`` in ``seconds`` is: rates, and the share of the roofline, 1 at most but for the noise of measuring."""
        rates = {"ms": seconds * 1e3, "gb_s": work.num_bytes / seconds / 1e9}
        if work.flops:
            rates["tflop_s"] = work.flops / seconds / 1e12
        return rates | {"share": self.seconds(work) / seconds}


def measure(device: torch.device, sizes: Sizes) -> Limits:
    source = torch.randint(0, 127, (sizes.copy_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = time_calls(lambda: target.copy_(source), device, sizes.rounds)
    a, b = (torch.randn(sizes.matmul_side, sizes.matmul_side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    matmul = time_calls(lambda: torch.mm(a, b, out=product), device, sizes.rounds)
    return Limits(2 * sizes.copy_bytes / copy.median_s, 2 * sizes.matmul_side**3 / matmul.median_s)


def run(device: torch.device, sizes: Sizes) -> list[Finding]:
    limits = measure(device, sizes)
    return [
        Finding("device-to-device copy", "measured", numbers={"gb_s": limits.bytes_s / 1e9}),
        Finding(f"bfloat16 product of side {sizes.matmul_side}", "measured", numbers={"tflop_s": limits.flops_s / 1e12}),
    ]
