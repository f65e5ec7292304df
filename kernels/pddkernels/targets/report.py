"""What compiling one thing told: the rows of ``pdd compile --json``, and how a child process hands them over. Imports no framework."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pddkernels.targets.hardware import Target
from pddkernels.targets.work import Work, bound


@dataclass(frozen=True)
class Memory:
    """Bytes per device, by the compiler's account. ``alias``: outputs that take the place of arguments."""

    arguments_bytes: int
    temporaries_bytes: int
    output_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Held at once at most."""
        return self.arguments_bytes + self.temporaries_bytes + self.output_bytes - self.alias_bytes


@dataclass(frozen=True)
class Registers:
    """Of one thread. ``spill_bytes`` went to memory for want of registers · ``shared_bytes``: of one program."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Facts of compiled code. ``work``: counted from shapes, per device · ``compiler_flops``, ``compiler_bytes``: the compiler's own count,
    which leaves out what it cannot see into (kernels) and counts a loop's body once · ``instructions``: counts of telling ones.
    """

    work: Work
    memory: Memory | None = None
    registers: Registers | None = None
    compiler_flops: float | None = None
    compiler_bytes: float | None = None
    instructions: dict[str, int] | None = None


@dataclass(frozen=True)
class Case:
    """One thing to compile: ``kind`` "kernel" or "step", ``what`` names it among the target's, ``compile`` does it or raises."""

    kind: str
    what: str
    compile: Callable[[], Compiled]
    num_devices: int = 1


def row(target: Target, case: Case, seconds: float, compiled: Compiled | None, error: str | None) -> dict[str, object]:
    """A JSON row. ``fits``: whether what is held at once fits the chip's memory; None where the compiler does not say."""
    memory = None if compiled is None else compiled.memory
    limits = None if compiled is None else bound(compiled.work, target.chip)
    fits = None if memory is None else memory.peak_bytes <= target.chip.memory_bytes
    if fits is False and error is None and memory is not None:
        error = f"needs {memory.peak_bytes / 1e9:.1f} GB per device, {target.chip.name} has {target.chip.memory_bytes / 1e9:.0f} GB"
    return {
        "target": target.name,
        "chip": target.chip.name,
        "kind": case.kind,
        "what": case.what,
        "num_devices": case.num_devices,
        "ok": error is None,
        "error": error,
        "seconds": round(seconds, 2),
        "memory": None if memory is None else asdict(memory) | {"peak_bytes": memory.peak_bytes, "fits": fits},
        "registers": None if compiled is None or compiled.registers is None else asdict(compiled.registers),
        "instructions": None if compiled is None else compiled.instructions,
        "flops": None if compiled is None else compiled.work.flops,
        "bytes": None if compiled is None else compiled.work.num_bytes,
        "compiler_flops": None if compiled is None else compiled.compiler_flops,
        "compiler_bytes": None if compiled is None else compiled.compiler_bytes,
        "roofline": None
        if limits is None
        else {
            "bound_s": limits.seconds,
            "bound_by": limits.by,
            "flops_share": limits.flops_s / limits.seconds,
            "bytes_share": limits.bytes_s / limits.seconds,
        },
    }


def compile_all(target: Target, cases: Sequence[Case], first: int) -> None:
    """Compile ``cases[first:]``, one after the other, telling each on stdout as JSON lines: ``{"start": i, "what", "kind", "total"}``, then
    the row. A compiler that takes the process down with it leaves a start without a row: the parent then goes on behind it.
    """
    for index in range(first, len(cases)):
        case = cases[index]
        _tell({"start": index, "what": case.what, "kind": case.kind, "num_devices": case.num_devices, "total": len(cases)})
        began = time.perf_counter()
        compiled, error = None, None
        try:
            compiled = case.compile()
        except Exception as failure:  # noqa: BLE001 - whatever a compiler raises is what the row is there to tell
            error = f"{type(failure).__name__}: {failure}"
        _tell(row(target, case, time.perf_counter() - began, compiled, error))


def _tell(message: dict[str, object]) -> None:
    print(json.dumps(message), file=sys.stdout, flush=True)
