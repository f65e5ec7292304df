"""``python -m pddkernels.targets.compare_tpu``: our attention against the one that ships in JAX, by the compiler's own schedules.

Both are compiled for a chip that is not here, at the same shapes, and libtpu's final schedules are read (by
:mod:`pddkernels.targets.bundles`): how many bundles each loop's body takes. How often each body runs follows from the rows of the step and
each kernel's own rule for walking them, written down below, and so do the bytes that it copies. The result is an estimate, not a
measurement: bundles are cycles unless the core waits, all branches of a body are counted as taken, copies are put at the memory's full
bandwidth, and neither counts the cost of starting a copy.

Of JAX's kernel two block sizes are tried, its table's among them, and the faster by this estimate is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pddkernels.shapes import MODEL_SHAPES
from pddkernels.targets.bundles import Loop, read_loops
from pddkernels.targets.cases import DECODE, MIXED, PAGE_SIZE, PREFILL, Phase
from pddkernels.targets.hardware import Target, target

# 197 TFLOP/s over 4 matrix units of 128 x 128, two FLOPs each a cycle (jax tpu_info). Known for this chip only: a v6e's units do not divide
# its peak so.
_CLOCK_HZ: Final = {"tpu-v5e": 197e12 / (4 * 128 * 128 * 2)}
_RUN: Final = 8  # tokens: a row inside one aligned run of so many takes the small loop of our kernel
_ITEMSIZE: Final = 2
# (pages, queries). The first are those of JAX's table for these heads on this chip, whose contexts are shorter; its default for what the
# table lacks, 128 pages, makes a loop that takes minutes to compile.
_THEIR_BLOCKS: Final = ((16, 32), (32, 32))


@dataclass(frozen=True)
class Blocks:
    """``queries``: tokens of a query block · ``keys``: tokens of a page buffer · ``update``: keys of one pass of the inner loop."""

    queries: int
    keys: int
    update: int


@dataclass(frozen=True)
class Estimate:
    """``compute_s``, ``copy_s``: what the schedule and the copies take, each alone; overlapped, the step takes the longer."""

    kernel: str
    phase: str
    model: str
    blocks: Blocks
    loop_bundles: tuple[int, ...]
    loop_spills: tuple[int, ...]
    compute_s: float
    copy_s: float
    copied_bytes: int
    copied_least_bytes: int

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.copy_s)


@dataclass
class _Trips:
    """How often the bodies run: ``small`` and ``full`` inner loops, page buffers, items (a row in a query block), and pages copied."""

    small: int = 0
    full: int = 0
    buffers: int = 0
    items: int = 0
    query_blocks: int = 0
    pages: int = 0


def our_trips(phase: Phase, blocks: Blocks) -> _Trips:
    """An item per row and query block; keys up to its last query's; as many updates of a buffer as it has keys for."""
    trips = _Trips(query_blocks=-(-phase.num_tokens // blocks.queries))
    row_start = 0
    for context_len, num_new in phase.rows:
        for block in range(row_start // blocks.queries, (row_start + num_new - 1) // blocks.queries + 1):
            first = max(row_start, block * blocks.queries)
            stop = min(row_start + num_new, (block + 1) * blocks.queries)
            pages = -(-(context_len + stop - row_start) // PAGE_SIZE)
            keys = context_len + stop - row_start
            buffers = -(-pages * PAGE_SIZE // blocks.keys)
            updates = sum(-(-min(blocks.keys, keys - i * blocks.keys) // blocks.update) for i in range(buffers))
            if stop <= first // _RUN * _RUN + _RUN:
                trips.small += updates
            else:
                trips.full += updates
            trips.items, trips.buffers, trips.pages = trips.items + 1, trips.buffers + buffers, trips.pages + pages
        row_start += num_new
    return trips


def their_trips(phase: Phase, blocks: Blocks) -> _Trips:
    """The same items; every one walks all keys of its row, in whole buffers: nothing is left out for causality."""
    trips = _Trips(query_blocks=-(-phase.num_tokens // blocks.queries))
    row_start = 0
    for context_len, num_new in phase.rows:
        items = (row_start + num_new - 1) // blocks.queries - row_start // blocks.queries + 1
        keys = context_len + num_new
        trips.items += items
        trips.full += items * -(-keys // blocks.keys)
        trips.pages += items * -(-keys // PAGE_SIZE)
        row_start += num_new
    trips.buffers = trips.full
    return trips


def estimate(kernel: str, root: Loop, phase: Phase, model: str, blocks: Blocks, chosen: Target) -> Estimate:
    """Raises ValueError if the schedule has other loops than the kernel is known to have."""
    shape = MODEL_SHAPES[model]
    inner = [loop for loop in root.walk() if loop.matmuls]
    around = {id(child): loop for loop in root.walk() for child in loop.inner}
    trips = (our_trips if kernel == "ours" else their_trips)(phase, blocks)
    if kernel == "ours":
        if len(inner) != 2:
            raise ValueError(f"ours: given {len(inner)} loops with products, expected a small and a full one")
        small, full = sorted(inner, key=lambda loop: loop.matmuls)
        per_buffer, per_item = around[id(full)], around[id(around[id(full)])]
        cycles = trips.small * small.bundles + trips.full * full.bundles + trips.buffers * per_buffer.bundles
        outer = around[id(per_item)]
    else:
        if len(inner) != 1:
            raise ValueError(f"theirs: given {len(inner)} loops with products, expected one")
        (full,) = inner
        per_item = around[id(full)]
        cycles, outer = trips.full * full.bundles, around[id(per_item)]
    cycles += trips.items * per_item.bundles + trips.query_blocks * outer.bundles
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * _ITEMSIZE
    query_bytes = 2 * phase.num_tokens * shape.num_heads * shape.head_dim * _ITEMSIZE
    copied = trips.pages * PAGE_SIZE * token_bytes + query_bytes
    least = sum(-(-sum(row) // PAGE_SIZE) for row in phase.rows) * PAGE_SIZE * token_bytes + query_bytes
    return Estimate(
        kernel,
        phase.name,
        model,
        blocks,
        tuple(loop.bundles for loop in inner),
        tuple(loop.spills for loop in inner),
        cycles / _CLOCK_HZ[chosen.name],
        copied / chosen.chip.bytes_s,
        copied,
        least,
    )


def compare(chosen: Target, model: str, tell: Callable[[Estimate], None]) -> list[Estimate]:
    """Ours and the best of theirs per phase. Raises RuntimeError with the compiler's message where one does not compile.

    Their loop is the same for any number of tokens, so it is compiled once per block sizes; ours has smaller blocks for small steps.
    """
    theirs = [_schedule(chosen, "theirs", PREFILL, model, blocks) for blocks in _THEIR_BLOCKS]
    found = []
    for phase in (PREFILL, DECODE, MIXED):
        loops, blocks = _schedule(chosen, "ours", phase, model, None)
        candidates = [estimate("theirs", root, phase, model, sizes, chosen) for root, sizes in theirs]
        for one in (estimate("ours", loops, phase, model, blocks, chosen), *candidates):
            tell(one)
        found += [estimate("ours", loops, phase, model, blocks, chosen), min(candidates, key=lambda candidate: candidate.seconds)]
    return found


def _schedule(chosen: Target, kernel: str, phase: Phase, model: str, pages_and_queries: tuple[int, int] | None) -> tuple[Loop, Blocks]:
    """Compiled in a child, since libtpu reads its flags once; (its loops, the blocks that it was compiled with)."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"target": chosen.name, "kernel": kernel, "phase": phase.name, "model": model, "blocks": pages_and_queries}
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "pddkernels.targets.compare_tpu_child", json.dumps(asked)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(ended.stderr)
        told = json.loads(ended.stdout.splitlines()[-1])
        (bundles,) = [path for path in Path(folder).glob("*ragged_paged_attention*-final_bundles.txt") if "analysis" not in path.name]
        (utilization,) = Path(folder).glob("*ragged_paged_attention*-final_hlo-static-per-bundle-utilization.txt")
        return read_loops(bundles.read_text(), utilization.read_text()), Blocks(**told)


def main() -> None:
    parser = argparse.ArgumentParser(description="our attention against JAX's, by the compiler's schedules")
    parser.add_argument("--target", default="tpu-v5e", choices=sorted(_CLOCK_HZ))
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(MODEL_SHAPES))
    parser.add_argument("--json", type=Path, help="write the estimates here")
    arguments = parser.parse_args()
    found = compare(target(arguments.target), arguments.model, lambda one: print(_line(one), flush=True))
    print("\nkept:", *map(_line, found), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


def _line(one: Estimate) -> str:
    loops, spills = ("+".join(map(str, counts)) for counts in (one.loop_bundles, one.loop_spills))
    return (
        f"{one.phase:>20} {one.kernel:>6} ({one.blocks.queries} queries, {one.blocks.keys} keys):"
        f" compute {one.compute_s * 1e3:.3f} ms, copies {one.copy_s * 1e3:.3f} ms"
        f" ({one.copied_bytes / one.copied_least_bytes:.2f} x the least),"
        f" inner loops of {loops} bundles, {spills} spills"
    )


if __name__ == "__main__":
    main()
