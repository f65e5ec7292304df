"""Reading schedules, and how often each kernel's loops run for a step: counted here one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddkernels.targets.bundles import Loop, read_loops
from pddkernels.targets.cases import PAGE_SIZE, PREFILL, Phase
from pddkernels.targets.compare_tpu import Blocks, estimate, our_trips, their_trips
from pddkernels.targets.hardware import target
from pddkernels.targets.work import Row

SCHEDULE = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2 PF: > { %13 = dma.hbm_to_vmem %s2 }
   0x3 LB: >> { %7 = vmatmul.bf16.gmra.mxu0 %v1  ;;  %8 = vmatmul.bf16.gmra.mxu1 %v2 }
   0x4   : >> { %9 = vst [vmem:[#allocation5_spill]] %v3 }
   0x5   :  { %10 = vnop }
   0x6   : > { %11 = vst %v4 }
   0x7 LB: >> { %12 = vld %s2 }
   0x8   :  { %15 = vnop }
"""
UTILIZATION = """\
== CAPACTIY:
MATMUL, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 1
0 0 0 0 0 1
0 0 0 0 0 0
2 0 0 0 0 0
0 0 2 1 1 0
0 0 0 0 0 0
0 0 0 1 0 0
0 1 0 0 0 0
0 0 0 0 0 0
"""


def test_bundles_are_counted_by_the_loop_they_are_in() -> None:
    root = read_loops(SCHEDULE, UTILIZATION)
    found = [(loop.depth, loop.bundles, loop.matmuls, loop.spills) for loop in root.walk()]
    # Slots behind a branch carry no mark: they belong to the loop that branched.
    assert found == [(0, 1, 0, 0), (1, 3, 0, 0), (2, 3, 2, 3), (2, 2, 0, 0)]


def test_texts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="bundles: 9, utilization of 10"):
        read_loops(SCHEDULE, UTILIZATION + "0 0 0 0 0 0\n")
    with pytest.raises(ValueError, match="more than the 8"):
        read_loops(SCHEDULE, UTILIZATION.removesuffix("0 0 0 0 0 0\n"))


rows_strategy = st.lists(st.builds(Row, st.integers(0, 900), st.integers(1, 150)), min_size=1, max_size=5)


@given(rows_strategy, st.sampled_from([16, 64]), st.sampled_from([256, 512]))
def test_trips_of_each_kernel(rows: list[Row], queries: int, keys: int) -> None:
    phase = Phase("drawn", tuple(rows))
    blocks = Blocks(queries, keys, 256)
    ours, theirs = our_trips(phase, blocks), their_trips(phase, blocks)
    by_item: dict[tuple[int, int], list[int]] = {}  # (row, query block) -> its tokens' places in the step
    token = 0
    for row, (_, num_new) in enumerate(rows):
        for _ in range(num_new):
            by_item.setdefault((row, token // queries), []).append(token)
            token += 1
    starts = {row: tokens[0] for (row, _), tokens in reversed(by_item.items())}
    small = full = pages = buffers = their_full = their_pages = 0
    for (row, _), tokens in by_item.items():
        seen = rows[row].context_len + tokens[-1] - starts[row] + 1
        updates = sum(1 for buffer in range(0, seen, keys) for update in range(buffer, min(buffer + keys, seen), 256) if update < seen)
        if tokens[0] // 8 == tokens[-1] // 8:
            small += updates
        else:
            full += updates
        pages += len({key // PAGE_SIZE for key in range(seen)})
        buffers += len({key // keys for key in range(seen)})
        whole = rows[row].context_len + rows[row].num_new
        their_full += len({key // keys for key in range(whole)})
        their_pages += len({key // PAGE_SIZE for key in range(whole)})
    assert (ours.small, ours.full, ours.items, ours.pages, ours.buffers) == (small, full, len(by_item), pages, buffers)
    assert (theirs.full, theirs.items, theirs.pages) == (their_full, len(by_item), their_pages)


def test_the_estimate_multiplies_bodies_by_trips() -> None:
    """A prefill of 2,048 tokens in blocks of 128 against 512 keys: 16 items, 40 buffers (1+1+1+1+2+2+...), 72 updates of 256 keys."""
    update, other = Loop(4, 1000, 128), Loop(4, 700, 64)
    buffer = Loop(3, 50, inner=[other, update])
    root = Loop(0, 9, inner=[Loop(1, 30, inner=[Loop(2, 20, inner=[buffer])])])
    one = estimate("ours", root, PREFILL, "llama-3.1-8b", Blocks(128, 512, 256), target("tpu-v5e"))
    assert one.compute_s * 1.5029e9 == pytest.approx(72 * 1000 + 40 * 50 + 16 * 20 + 16 * 30, rel=1e-3)
    # Pages of block i: 8 (i + 1). Keys and values of 16 tokens, 8 heads of 128; queries and results.
    copied = sum(8 * (i + 1) for i in range(16)) * 16 * 2 * 8 * 128 * 2 + 2 * 2048 * 32 * 128 * 2
    assert one.copied_bytes == copied
    assert one.copy_s == copied / 819e9
    with pytest.raises(ValueError, match="ours: given 1 loops with products"):
        estimate("ours", Loop(0, inner=[Loop(1, inner=[update])]), PREFILL, "llama-3.1-8b", Blocks(128, 512, 256), target("tpu-v5e"))
