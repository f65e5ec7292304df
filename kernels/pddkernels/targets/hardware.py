"""Chips by their published peak rates, and which chip a compilation target stands for. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_GB: Final = 10**9
_MIB: Final = 2**20
_KIB: Final = 2**10


@dataclass(frozen=True)
class Chip:
    """Peaks of one chip; nothing reaches them. ``flops_s``: dense bfloat16, float32 accumulation, without structured sparsity ·
    ``memory_bytes``, ``bytes_s``: device memory (HBM or GDDR) and its bandwidth · ``on_chip_bytes``: what a program addresses itself, VMEM
    of a TensorCore, shared memory (LDS) of a multiprocessor (compute unit) · ``source``, ``read_on``: where and when figures were read.
    """

    name: str
    flops_s: float
    memory_bytes: int
    bytes_s: float
    on_chip_bytes: int
    source: str
    read_on: str


_READ: Final = "2026-11-30"

CHIPS: Final[dict[str, Chip]] = {
    chip.name: chip
    for chip in (
        Chip("TPU v5e", 197e12, 16 * _GB, 819e9, 128 * _MIB, "docs.cloud.google.com/tpu/docs/v5e; VMEM: jax tpu_info", _READ),
        Chip("TPU v5p", 459e12, 95 * _GB, 2765e9, 64 * _MIB, "docs.cloud.google.com/tpu/docs/v5p; VMEM: jax tpu_info", _READ),
        Chip("TPU v6e", 918e12, 32 * _GB, 1638e9, 128 * _MIB, "docs.cloud.google.com/tpu/docs/v6e; VMEM: jax tpu_info", _READ),
        Chip("A100 SXM 80GB", 312e12, 80 * _GB, 2039e9, 164 * _KIB, "NVIDIA A100 datasheet; Ampere white paper", _READ),
        Chip("H100 SXM", 989.4e12, 80 * _GB, 3350e9, 228 * _KIB, "NVIDIA H100 datasheet; Hopper white paper", _READ),
        Chip("H200 SXM", 989.4e12, 141 * _GB, 4800e9, 228 * _KIB, "NVIDIA H200 datasheet (half of the rate with sparsity)", _READ),
        Chip("L40S", 362e12, 48 * _GB, 864e9, 100 * _KIB, "NVIDIA L40S datasheet (half of the rate with sparsity)", _READ),
        Chip("MI300X", 1307.4e12, 192 * _GB, 5300e9, 64 * _KIB, "AMD Instinct MI300X datasheet; CDNA 3 white paper", _READ),
    )
}


@dataclass(frozen=True)
class Target:
    """What ``pdd compile --target`` names. ``chip``: whose peaks the roofline takes · ``topology``: of a TPU slice of ``num_devices``
    chips, in libtpu's words; None for GPUs, whose kernels are compiled for one device.
    """

    name: str
    chip: Chip
    topology: str | None = None
    num_devices: int = 1


TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (
        Target("tpu-v5e", CHIPS["TPU v5e"], "v5e:2x4", 8),
        Target("tpu-v6e", CHIPS["TPU v6e"], "v6e:2x4", 8),
        Target("tpu-v5p", CHIPS["TPU v5p"], "v5p:2x2x2", 8),
        Target("cuda-sm80", CHIPS["A100 SXM 80GB"]),
        Target("cuda-sm90", CHIPS["H100 SXM"]),
        Target("hip-gfx942", CHIPS["MI300X"]),
    )
}


def target(name: str) -> Target:
    """Raises ValueError for an unknown target."""
    if name not in TARGETS:
        raise ValueError(f"target: given {name!r}, allowed {[*TARGETS, 'all']}")
    return TARGETS[name]
