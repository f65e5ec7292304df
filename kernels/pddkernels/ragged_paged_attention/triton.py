"""Ragged paged attention in Triton, for NVIDIA and AMD: one kernel for tiles of queries, one that merges the pieces of split key ranges.

A program takes a tile, some tokens' query heads of one KV head, and scans a range of keys with a running softmax (arXiv:2205.14135),
scores and sums in float32, both products on tensor cores where the dtype has them. A step has two launches of it: rows of few new tokens
in low tiles, chunks and longer extends in high ones. Where there are fewer tiles than processors could take, a tile's keys are cut in
ranges, each range leaves a partial result, and the second kernel merges them (arXiv:2311.01282). What is cut is planned once per step on
the host, by :mod:`triton_plan`; nothing here waits for the device, and a launch's grid depends on the plan's sizes alone, so a step can be
captured in a graph: with a plan whose sizes hold for any decode step (:mod:`triton_decode_plan`).

Keys are read through the page table where they lie. A block in which every query sees every key takes no mask; the others mask scores,
and loads too, so that slots which no query of the tile sees are not read and may hold NaN. Offsets into pages are 64-bit.
"""

# Kernels' arguments are Triton's tensors or pointers, as the call has it; only compile-time constants are annotated.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.triton_plan import ITEM_FIELDS, MERGE_FIELDS, Plan, Work
from pddkernels.ragged_paged_attention.triton_tiles import Geometry

LOG2_E = tl.constexpr(1.4426950408889634)
# Where nothing was seen yet: finite, so that differences of two of them are no NaN.
LOWEST = tl.constexpr(-1.0e30)
MERGED_AT_ONCE = 8  # partial results per pass of the merging loop: their loads are in flight together


@triton.jit
def _tanh(x):
    """Without a device library, exact to float32 rounding: the quotient loses the digits of small x, which a series has."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    quotient = (1.0 - decay) / (1.0 + decay)
    quotient = tl.where(x < 0, -quotient, quotient)
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    return tl.where(y < 0.0625, series, quotient)


@triton.jit
def _page_offsets(page_ids, slots, kv_head, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr):
    """Where a token's values of a head begin in pages [N, KV_HEADS, PAGE_SIZE, DIM], in values: int64, since pools exceed 2**31."""
    return ((page_ids.to(tl.int64) * KV_HEADS + kv_head) * PAGE_SIZE + slots) * DIM


@triton.jit
def load_page_ids(table, start, key_begin, key_end, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Page ids of keys ``start`` .. ``start + KEYS``, read where they lie in [key_begin, key_end)."""
    keys = start + tl.arange(0, KEYS)
    return tl.load(table + keys // PAGE_SIZE, mask=(keys >= key_begin) & (keys < key_end), other=0)


@triton.jit
def _scan(
    acc,
    highest,
    total,
    q,
    k_pages,
    v_pages,
    table,
    kv_head,
    positions,
    begin,
    end,
    key_begin,
    key_end,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Take the keys [begin, end) into the running softmax (acc, highest, total). Both are multiples of KEYS unless MASKED, in which case
    only keys [key_begin, key_end) are read, and each query sees those up to its position, of the last ``window``."""
    dims = tl.arange(0, PADDED_DIM)
    # A pass finds its page ids loaded by the one before, so its loads of keys need not wait for them.
    page_ids = load_page_ids(table, begin, key_begin, key_end, PAGE_SIZE, KEYS)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        stored = (keys >= key_begin) & (keys < key_end)
        offsets = _page_offsets(page_ids, keys % PAGE_SIZE, kv_head, KV_HEADS, PAGE_SIZE, DIM)[:, None] + dims[None, :]
        if MASKED and PADDED_DIM != DIM:
            live = stored[:, None] & (dims < DIM)[None, :]
            k = tl.load(k_pages + offsets, mask=live, other=0.0)
            v = tl.load(v_pages + offsets, mask=live, other=0.0)
        elif MASKED:
            k = tl.load(k_pages + offsets, mask=stored[:, None], other=0.0)
            v = tl.load(v_pages + offsets, mask=stored[:, None], other=0.0)
        elif PADDED_DIM != DIM:
            k = tl.load(k_pages + offsets, mask=(dims < DIM)[None, :], other=0.0)
            v = tl.load(v_pages + offsets, mask=(dims < DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_pages + offsets)
            v = tl.load(v_pages + offsets)
        scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        # From here on in base 2: exp2 is what the hardware has.
        scores = _tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E) if HAS_CAP else scores * (scale * LOG2_E)
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
        page_ids = load_page_ids(table, start + KEYS, key_begin, key_end, PAGE_SIZE, KEYS)
    return acc, highest, total


@triton.jit(do_not_specialize=["window"])
def attend_tiles(
    queries,
    k_pages,
    v_pages,
    sinks,
    page_tables,
    items,
    out,
    partials,
    partial_sums,
    query_stride,
    table_stride,
    scale,
    soft_cap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program per (item, KV head). ``items`` [n, FIELDS] i32: see ``triton_plan.Work``; without a window ``key_begin`` is a multiple
    of KEYS. ``queries`` [T, HEADS, DIM], tokens ``query_stride`` values apart · ``out`` [T, HEADS, DIM] · ``partials`` [p, KV_HEADS, ROWS,
    DIM] and ``partial_sums`` [p, KV_HEADS, ROWS, 2] float32 · ``DOT``: the dtype in which products take their operands."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    item = items + (program // KV_HEADS) * FIELDS
    table = page_tables + tl.load(item).to(tl.int64) * table_stride
    first_token = tl.load(item + 1).to(tl.int64)
    num_tokens = tl.load(item + 2)
    first_position = tl.load(item + 3)
    key_begin = tl.load(item + 4)
    key_end = tl.load(item + 5)
    partial = tl.load(item + 6).to(tl.int64)
    is_split = tl.load(item + 7) != 0

    rows = tl.arange(0, ROWS)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    valid = tokens < num_tokens
    positions = first_position + tokens
    dims = tl.arange(0, PADDED_DIM)
    live = valid[:, None] & (dims < DIM)[None, :]
    at_queries = (first_token + tokens)[:, None] * query_stride + heads[:, None] * DIM + dims[None, :]
    q = tl.load(queries + at_queries, mask=live, other=0.0).to(DOT)

    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:  # a sink counts once: for split ranges when they are merged
        highest = tl.where(is_split, highest, tl.load(sinks + heads, mask=valid, other=0.0) * LOG2_E)
        total = tl.where(is_split, total, 1.0)

    # [inner_begin, inner_end): blocks of which every query of the tile sees every key.
    begin = key_begin // KEYS * KEYS
    inner_end = tl.minimum(key_end, first_position + 1) // KEYS * KEYS
    if HAS_WINDOW:
        first_seen_by_all = tl.maximum(key_begin, first_position + num_tokens - window)
        inner_begin = (first_seen_by_all + KEYS - 1) // KEYS * KEYS
        acc, highest, total = _scan(
            acc, highest, total, q, k_pages, v_pages, table, kv_head, positions,
            begin, tl.minimum(inner_begin, key_end), key_begin, key_end, scale, soft_cap, window,
            KV_HEADS, DIM, PADDED_DIM, PAGE_SIZE, KEYS, HAS_CAP, HAS_WINDOW, True, DOT,
        )  # fmt: skip
    else:
        inner_begin = begin
    inner_end = tl.maximum(inner_begin, inner_end)
    acc, highest, total = _scan(
        acc, highest, total, q, k_pages, v_pages, table, kv_head, positions,
        inner_begin, inner_end, key_begin, key_end, scale, soft_cap, window,
        KV_HEADS, DIM, PADDED_DIM, PAGE_SIZE, KEYS, HAS_CAP, HAS_WINDOW, False, DOT,
    )  # fmt: skip
    acc, highest, total = _scan(
        acc, highest, total, q, k_pages, v_pages, table, kv_head, positions,
        inner_end, key_end, key_begin, key_end, scale, soft_cap, window,
        KV_HEADS, DIM, PADDED_DIM, PAGE_SIZE, KEYS, HAS_CAP, HAS_WINDOW, True, DOT,
    )  # fmt: skip

    if is_split:
        at = (partial * KV_HEADS + kv_head) * ROWS + rows
        tl.store(partials + at[:, None] * DIM + dims[None, :], acc, mask=live)
        tl.store(partial_sums + at * 2, highest, mask=valid)
        tl.store(partial_sums + at * 2 + 1, total, mask=valid)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        at_out = ((first_token + tokens) * HEADS + heads)[:, None] * DIM + dims[None, :]
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def merge_partials(
    partials,
    partial_sums,
    sinks,
    merges,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program per (merge, KV head, row of the tile). ``merges`` [n, FIELDS] i32: see ``triton_plan.Work``."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    program = tl.program_id(0)
    row = program % ROWS
    kv_head = program // ROWS % KV_HEADS
    merge = merges + (program // ROWS // KV_HEADS) * FIELDS
    first_token = tl.load(merge).to(tl.int64)
    num_tokens = tl.load(merge + 1)
    first_partial = tl.load(merge + 2).to(tl.int64)
    num_partials = tl.load(merge + 3)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    if token < num_tokens:
        dims = tl.arange(0, PADDED_DIM)
        acc = tl.zeros((PADDED_DIM,), tl.float32)
        if HAS_SINKS:
            highest = tl.load(sinks + head) * LOG2_E
            total = 1.0
        else:
            highest = LOWEST
            total = 0.0
        for start in range(0, num_partials, AT_ONCE):
            pieces = start + tl.arange(0, AT_ONCE)
            live = pieces < num_partials
            at = ((first_partial + pieces) * KV_HEADS + kv_head) * ROWS + row
            piece_highest = tl.load(partial_sums + at * 2, mask=live, other=LOWEST)
            piece_total = tl.load(partial_sums + at * 2 + 1, mask=live, other=0.0)
            values = tl.load(partials + at[:, None] * DIM + dims[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0)
            new_highest = tl.maximum(highest, tl.max(piece_highest, 0))
            weights = tl.where(live, tl.exp2(piece_highest - new_highest), 0.0)
            shrink = tl.exp2(highest - new_highest)
            acc = acc * shrink + tl.sum(values * weights[:, None], 0)
            total = total * shrink + tl.sum(piece_total * weights, 0)
            highest = new_highest
        at_out = ((first_token + token) * HEADS + head) * DIM + dims
        tl.store(out + at_out, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)


def ragged_paged_attention(
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    plan: Plan,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, for a planned batch: [T, heads, dim] in the queries' dtype.

    ``queries`` [T, heads, dim], heads back to back, tokens any distance apart · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim],
    contiguous, the new tokens' KV already stored · ``sinks`` [heads] float32. All on the plan's device. Tokens of no row, which a batch
    padded to a captured size has, get arbitrary values.

    Raises ValueError for a shape that is not the plan's, or a window that was not planned for.
    """
    geometry = plan.geometry
    num_kv_heads, page_size, dim = k_pages.shape[1:]
    given = (queries.shape[1], num_kv_heads, dim, page_size)
    planned = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page_size)
    if given != planned or v_pages.shape != k_pages.shape:
        raise ValueError(f"(heads, kv_heads, dim, page_size): given {given}, planned for {planned}")
    if options.window not in plan.works:
        raise ValueError(f"window: given {options.window}, planned for {sorted(plan.works, key=str)}")
    if queries.stride()[1:] != (dim, 1) or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError(f"queries: strides {queries.stride()}, allowed (any, {dim}, 1); pages must be contiguous")
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for work in plan.works[options.window]:
        _launch(work, plan, queries, k_pages, v_pages, options, sinks, out)
    return out


def _launch(
    work: Work,
    plan: Plan,
    queries: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    geometry, tile = plan.geometry, work.tile
    num_items, num_merges = len(work.items), len(work.merges)
    if num_items == 0:
        return
    kv_heads, dim = geometry.num_kv_heads, geometry.head_dim
    partials = torch.empty((work.num_partials, kv_heads, tile.rows, dim), dtype=torch.float32, device=out.device)
    partial_sums = torch.empty((work.num_partials, kv_heads, tile.rows, 2), dtype=torch.float32, device=out.device)
    sinks_or_any = partial_sums if sinks is None else sinks
    attend_tiles[(num_items * kv_heads,)](
        queries, k_pages, v_pages, sinks_or_any, plan.page_tables, work.items, out, partials, partial_sums,
        queries.stride(0), plan.page_tables.stride(0), options.scale, options.soft_cap or 1.0, options.window or 0,
        HEADS=geometry.num_heads, KV_HEADS=kv_heads, DIM=dim, PADDED_DIM=geometry.padded_dim, PAGE_SIZE=geometry.page_size,
        ROWS=tile.rows, KEYS=tile.keys, FIELDS=ITEM_FIELDS,
        HAS_SINKS=sinks is not None, HAS_CAP=options.soft_cap is not None, HAS_WINDOW=options.window is not None,
        DOT=dot_dtype(queries.dtype, k_pages.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if num_merges:
        merge_partials[(num_merges * kv_heads * tile.rows,)](
            partials, partial_sums, sinks_or_any, work.merges, out,
            HEADS=geometry.num_heads, KV_HEADS=kv_heads, DIM=dim, PADDED_DIM=geometry.padded_dim,
            ROWS=tile.rows, FIELDS=MERGE_FIELDS, AT_ONCE=MERGED_AT_ONCE, HAS_SINKS=sinks is not None,
            num_warps=merge_warps(geometry), num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


def merge_warps(geometry: Geometry) -> int:
    return 1 if geometry.padded_dim <= 128 else 2


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_dtype(query_dtype: torch.dtype, kv_dtype: torch.dtype) -> tl.dtype:
    """The wider of the two. Triton's interpreter, which runs on numpy, multiplies bfloat16 exactly in float32 and has no other way."""
    dtype = torch.promote_types(query_dtype, kv_dtype)
    return tl.float32 if triton.knobs.runtime.interpret and dtype == torch.bfloat16 else _TRITON_DTYPES[dtype]
