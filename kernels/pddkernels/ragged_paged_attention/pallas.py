"""Ragged paged attention for TPU in Pallas: one kernel for prefill chunks, extends and decode rows, double-buffered page DMA.

**Work.** Queries are cut into blocks of ``query_tokens`` aligned tokens; what one row has in one block is an *item*. XLA lists the items
(:func:`plan_items`, the same for every layer of a step, so computed once) and the kernel walks them: for each, the row's pages from the
first that its window sees to the last that causality allows, ``kv_tokens`` at a time. While one buffer is computed on, the pages of the
next are in flight into the other, across items and blocks, so that the copy engine never waits for a row to end.

**Rows of a matrix product.** Queries are head-major, [heads, tokens, dim], so the group of a KV head times a run of tokens is one matrix,
[group * tokens, dim], without moving a value. An item inside one aligned run of 8 tokens (a decode row, a short extend) computes that run
alone; anything longer computes the block. So a decode row costs group * 8 matrix rows, one sublane tile per query head, and its time is
its page copies.

**Softmax** is the one-pass kind (arXiv:2205.14135) in float32. The sum is kept per lane and added up once at the end.

**Lanes.** Mosaic copies only whole tiles of 128 lanes, so for a compiled kernel the last axis of ``pages`` must be a multiple of 128:
:func:`padded_dim`. XLA pads an array of head_dim 64, 80 or 96 to 128 lanes in HBM anyhow, so this costs no memory. Lanes past the
queries' dim must be finite (they meet zeros of the padded queries); whoever allocates pages fills them with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pddkernels.ragged_paged_attention.block_sizes import BlockSizes
from pddkernels.ragged_paged_attention.options import AttentionOptions

LANES: Final = 128
SUBLANES: Final = 8
_SMALL: Final = SUBLANES  # tokens of a small item: one float32 sublane tile
_MAX_UNROLLED_COPIES: Final = 32
# Scores, of all heads that are updated together: as many as the 64 vector registers hold. By libtpu 0.0.52's schedule an update of 8 heads
# of a decode row by 256 keys takes 1,077 cycles on a v5e head by head, 771 by fours, 688 all at once; on a v6e 1,023, 731 and 690.
_SCORES_TOGETHER: Final = 64 * LANES * SUBLANES
_MASKED: Final = -1e30  # finite: a row of nothing but masked scores must not become NaN


def padded_dim(dim: int) -> int:
    """Lanes that a head of ``dim`` values takes in pages that a compiled kernel reads."""
    return -(-dim // LANES) * LANES


def padded_heads(kv_heads: int) -> int:
    """KV heads that pages of ``kv_heads`` heads must have for a compiled kernel: 1, 2, or a multiple of 4."""
    return kv_heads if kv_heads <= 2 else -(-kv_heads // 4) * 4


def ragged_paged_attention(
    queries: jax.Array,
    pages: jax.Array,
    row_starts: jax.Array,
    context_lens: jax.Array,
    page_tables: jax.Array,
    num_rows: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    *,
    blocks: BlockSizes,
    kv_heads: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it: [T, heads, dim] in the queries' dtype.

    ``queries`` [T, heads, dim] float32 or bfloat16 · ``pages`` [N, page_size, 2 * kv_heads or more, dim or more] float32, bfloat16 or the
    latter's bits in uint16, k0 v0 k1 v1 ..., the new tokens' KV already stored · ``row_starts`` [R + 1], ``context_lens`` [R],
    ``page_tables`` [R, P], ``num_rows`` [1] i32: rows past ``num_rows`` are ignored, whatever these say of them ·
    ``sinks`` [heads] float32 · ``kv_heads``: how many heads are real, None for all that the pages have. Tokens of no row give zeros.

    Static shapes, so it may be traced inside jit or, on its share of the heads, inside shard_map. Raises ValueError for shapes and dtypes
    that the kernel does not support.
    """
    kv_heads = pages.shape[2] // 2 if kv_heads is None else kv_heads
    _check(queries, pages, row_starts, context_lens, page_tables, sinks, kv_heads, interpret)
    num_tokens, num_heads, dim = queries.shape
    if interpret:  # any shape of pages; on a chip this would copy the pool
        heads, lanes = padded_heads(pages.shape[2] // 2), padded_dim(pages.shape[3])
        pages = jnp.pad(pages, ((0, 0), (0, 0), (0, 2 * heads - pages.shape[2]), (0, lanes - pages.shape[3])))
    page_size, planes, lanes = pages.shape[1:]
    query_tokens = min(blocks.query_tokens, -(-num_tokens // (16 * blocks.num_cores)) * 16)
    per_core = -(-num_tokens // (query_tokens * blocks.num_cores))
    num_blocks = per_core * blocks.num_cores
    padding = num_blocks * query_tokens - num_tokens
    by_head = jnp.pad(queries, ((0, padding), (0, 0), (0, lanes - dim))).transpose(1, 0, 2)
    plan = plan_items(row_starts, context_lens, num_rows, num_blocks, query_tokens, page_size, options.window, blocks.num_cores)

    shape = _Shape(
        num_heads=num_heads,
        kv_heads=kv_heads,
        stored_heads=planes // 2,
        lanes=lanes,
        query_tokens=query_tokens,
        page_size=page_size,
        pages_per_copy=max(1, min(blocks.kv_tokens // page_size, page_tables.shape[1])),
        compute_tokens=blocks.compute_tokens,
        table_width=page_tables.shape[1],
        num_blocks=num_blocks,
        max_items=num_blocks + context_lens.shape[0],
        num_cores=blocks.num_cores,
        unroll=not interpret or kv_heads <= 2,
        dtype=jnp.promote_types(queries.dtype, jnp.bfloat16 if pages.dtype == jnp.uint16 else pages.dtype),
    )
    block = pl.BlockSpec((num_heads, query_tokens, lanes), lambda core, i, *_: (0, i * blocks.num_cores + core, 0))
    inputs = [plan, page_tables.reshape(-1), by_head, pages]
    in_specs = [block, pl.BlockSpec(memory_space=pl.ANY)]
    if sinks is not None:
        inputs.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (num_heads, 1, LANES)))
        in_specs.append(pl.BlockSpec((num_heads, 1, LANES), lambda *_: (0, 0, 0)))
    rows = shape.group * query_tokens
    out = pl.pallas_call(
        functools.partial(_kernel, shape=shape, options=options, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct(by_head.shape, queries.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks.num_cores, per_core),
            in_specs=in_specs,
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, lanes // LANES, shape.buffer_tokens, planes, LANES), pages.dtype),
                pltpu.VMEM((num_heads, query_tokens, lanes), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, lanes), jnp.float32),
                pltpu.VMEM((num_heads, query_tokens, lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if blocks.num_cores > 1 else "arbitrary", "arbitrary"), vmem_limit_bytes=blocks.vmem_limit_bytes
        ),
        interpret=interpret,
        name="pdd_ragged_paged_attention",
    )(*inputs)
    return out.transpose(1, 0, 2)[:num_tokens, :, :dim]


@dataclass(frozen=True)
class _Shape:
    """What the kernel is compiled for. ``dtype``: of the matrix products' operands · ``unroll``: all heads, and all page copies of a
    buffer, in one straight line, so that their instructions overlap. A loop compiles faster where that gains nothing.
    """

    num_heads: int
    kv_heads: int
    stored_heads: int
    lanes: int
    query_tokens: int
    page_size: int
    pages_per_copy: int
    compute_tokens: int
    table_width: int
    num_blocks: int
    max_items: int
    num_cores: int
    unroll: bool
    dtype: jnp.dtype

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def buffer_tokens(self) -> int:
        """Whole pages, and whole updates: what lies past the pages is zeroed before it is read."""
        return -(-self.pages_per_copy * self.page_size // self.compute_tokens) * self.compute_tokens


def _check(
    queries: jax.Array,
    pages: jax.Array,
    row_starts: jax.Array,
    context_lens: jax.Array,
    page_tables: jax.Array,
    sinks: jax.Array | None,
    kv_heads: int,
    interpret: bool,
) -> None:
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"queries: given {queries.dtype}, allowed float32 or bfloat16")
    if pages.dtype not in (jnp.float32, jnp.bfloat16, jnp.uint16):
        raise ValueError(f"pages: given {pages.dtype}, allowed float32, bfloat16 or its bits in uint16")
    num_heads, dim = queries.shape[1:]
    num_planes, stored_dim = pages.shape[2:]
    if num_heads % kv_heads or num_planes % 2 or num_planes < 2 * kv_heads:
        raise ValueError(f"kv_heads: given {kv_heads} for {num_heads} query heads and pages of {num_planes} planes")
    if stored_dim < dim:
        raise ValueError(f"pages: given dim {stored_dim}, must be at least the queries' {dim}")
    if not interpret and (padded_heads(num_planes // 2), padded_dim(stored_dim)) != (num_planes // 2, stored_dim):
        raise ValueError(f"pages: given {num_planes // 2} heads of dim {stored_dim}, must be padded as padded_heads and padded_dim tell")
    if len(row_starts) != len(context_lens) + 1 or len(page_tables) != len(context_lens):
        raise ValueError(f"row_starts, context_lens, page_tables: given {len(row_starts)}, {len(context_lens)}, {len(page_tables)} rows")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks: given {sinks.shape}, must be ({num_heads},)")


def plan_items(
    row_starts: jax.Array,
    context_lens: jax.Array,
    num_rows: jax.Array,
    num_blocks: int,
    query_tokens: int,
    page_size: int,
    window: int | None,
    num_cores: int,
) -> jax.Array:
    """One flat i32 array (a scalar core reads one-dimensional memory without padding): [num_blocks + 1] where a block's items begin, blocks
    in the order in which cores take them, then per item, field by field: row, first token and end of its tokens in the block, position of
    the block's first token as that row would count, first page, end of pages.
    """
    num = context_lens.shape[0]
    max_items = num_blocks + num
    starts, stops = row_starts[:-1], row_starts[1:]
    used = (jnp.arange(num) < num_rows[0]) & (stops > starts)
    first_block = starts // query_tokens
    count = jnp.where(used, (stops - 1) // query_tokens - first_block + 1, 0)
    ends = jnp.cumsum(count)
    item = jnp.arange(max_items)
    row = jnp.minimum((item[:, None] >= ends).sum(1), num - 1)
    block = jnp.where(item < ends[-1], first_block[row] + item - (ends - count)[row], num_blocks)
    # Core c takes blocks c, c + cores, ...; its items lie together.
    turn = jnp.where(block < num_blocks, block % num_cores * (num_blocks // num_cores) + block // num_cores, num_blocks)
    if num_cores > 1:
        order = jnp.argsort(turn, stable=True)
        row, block, turn = row[order], block[order], turn[order]
    block_items = (turn[:, None] < jnp.arange(num_blocks + 1)).sum(0)
    origin = block * query_tokens
    start, stop = jnp.maximum(starts[row] - origin, 0), jnp.minimum(stops[row] - origin, query_tokens)
    base = context_lens[row] + origin - starts[row]
    first_key = jnp.zeros_like(base) if window is None else jnp.maximum(base + start - window + 1, 0)
    end_page = (base + stop + page_size - 1) // page_size
    return jnp.concatenate((block_items, row, start, stop, base, first_key // page_size, end_page)).astype(jnp.int32)


class Item(NamedTuple):
    """What one row has in one query block: the scalars that :func:`plan_items` lists."""

    row: jax.Array
    start: jax.Array
    stop: jax.Array
    base: jax.Array
    first_page: jax.Array
    end_page: jax.Array


def item_at(plan: jax.Array, i: jax.Array, num_blocks: int, max_items: int) -> Item:
    """Item ``i`` of a plan in scalar memory."""
    return Item(*(plan[num_blocks + 1 + field * max_items + i] for field in range(len(Item._fields))))


def _kernel(
    plan: jax.Array,
    tables: jax.Array,
    queries: jax.Array,
    pages: jax.Array,
    *refs: jax.Array,
    shape: _Shape,
    options: AttentionOptions,
    has_sinks: bool,
) -> None:
    sinks = refs[0] if has_sinks else None
    out, kv, scaled, highest, total, mixed, result, copied, turn = refs[has_sinks:]
    core, step = pl.program_id(0), pl.program_id(1)
    per_core = shape.num_blocks // shape.num_cores
    block = core * per_core + step
    core_end = plan[(core + 1) * per_core]
    num_planes, ppc, ps = 2 * shape.stored_heads, shape.pages_per_copy, shape.page_size
    lane_tiles = shape.lanes // LANES

    def at(i: jax.Array) -> Item:
        return item_at(plan, i, shape.num_blocks, shape.max_items)

    def pages_of(item: Item, turn_of_item: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = item.first_page + turn_of_item * ppc
        return first, jnp.minimum(item.end_page - first, ppc)

    def each_copy(item: Item, j: jax.Array, buffer: jax.Array, *, wait: bool) -> None:
        """Start the page copies of an item's ``j``-th buffer, or wait for them."""
        first, count = pages_of(item, j)
        entry = item.row * shape.table_width + first

        def one(k: jax.Array | int, _: None = None) -> None:
            page = tables[entry + k]
            for tile in range(lane_tiles):
                source = pages.at[page, :, :, pl.ds(tile * LANES, LANES)]
                copy = pltpu.make_async_copy(source, kv.at[buffer, tile, pl.ds(k * ps, ps)], copied.at[buffer])
                if wait:
                    copy.wait()
                else:
                    copy.start()

        if not shape.unroll or ppc > _MAX_UNROLLED_COPIES:
            jax.lax.fori_loop(0, count, one, None)
            return

        @pl.when(count == ppc)
        def _whole() -> None:
            for k in range(ppc):
                one(k)

        @pl.when(count < ppc)
        def _part() -> None:
            jax.lax.fori_loop(0, count, one, None)

    @pl.when(step == 0)
    def _first_copy() -> None:
        turn[0] = 0

        @pl.when(plan[block] < core_end)
        def _start() -> None:
            each_copy(at(plan[block]), jnp.int32(0), jnp.int32(0), wait=False)

    scaled[...] = queries[...].astype(jnp.float32) * options.scale
    result[...] = jnp.zeros_like(result)

    def one_item(i: jax.Array, _: None) -> None:
        item = at(i)
        first_key = jnp.int32(0) if options.window is None else jnp.maximum(item.base + item.start - options.window + 1, 0)
        num_copies = pl.cdiv(item.end_page - item.first_page, ppc)
        run = item.start // _SMALL * _SMALL
        is_small = item.stop <= run + _SMALL
        begin = pl.multiple_of(jnp.where(is_small, run, 0), _SMALL)

        def sized(act: Callable[[int], None]) -> None:
            if shape.query_tokens <= _SMALL:
                act(shape.query_tokens)
                return
            pl.when(is_small)(lambda: act(_SMALL))
            pl.when(jnp.logical_not(is_small))(lambda: act(shape.query_tokens))

        def reset(tokens: int) -> None:
            rows = shape.group * tokens

            def reset_head(head: jax.Array | int) -> None:
                if sinks is None:
                    highest[head, :rows] = jnp.full((rows, LANES), _MASKED, jnp.float32)
                    total[head, :rows] = jnp.zeros((rows, LANES), jnp.float32)
                else:  # as if one key with this score had been seen, with a value of zero
                    sink = sinks[pl.ds(head * shape.group, shape.group)]
                    highest[head, :rows] = jnp.broadcast_to(sink, (shape.group, tokens, LANES)).reshape(rows, LANES)
                    lane = jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
                    total[head, :rows] = jnp.where(lane == 0, 1.0, 0.0)
                mixed[head, :rows] = jnp.zeros((rows, shape.lanes), jnp.float32)

            _each_head(shape, reset_head)

        def one_copy(j: jax.Array, _: None) -> None:
            buffer = turn[0]
            turn[0] = 1 - buffer
            is_last = j + 1 == num_copies
            following = jnp.where(is_last, i + 1, i)

            @pl.when(following < core_end)
            def _start_next() -> None:
                each_copy(at(following), jnp.where(is_last, 0, j + 1), 1 - buffer, wait=False)

            each_copy(item, j, buffer, wait=True)
            first, count = pages_of(item, j)
            origin = first * ps
            low = jnp.maximum(first_key - origin, 0)
            high = jnp.minimum(item.base + item.stop - origin, count * ps)
            first_update, end_update = low // shape.compute_tokens, pl.cdiv(high, shape.compute_tokens)

            def clear(t: jax.Array, _: None) -> None:
                for tile in range(lane_tiles):
                    kv[buffer, tile, t] = jnp.zeros((num_planes, LANES), kv.dtype)

            # What no query of the item sees may be NaN, and NaN times a weight of zero is NaN.
            jax.lax.fori_loop(first_update * shape.compute_tokens, low, clear, None)
            jax.lax.fori_loop(high, end_update * shape.compute_tokens, clear, None)
            sized(lambda tokens: jax.lax.fori_loop(first_update, end_update, functools.partial(update, tokens, buffer, origin), None))

        def update(tokens: int, buffer: jax.Array, origin: jax.Array, u: jax.Array, _: None) -> None:
            first_local = u * shape.compute_tokens
            # Query token t stands at base + begin + t, key k at origin + first_local + k.
            distance = origin + first_local - item.base - begin
            ahead = jax.lax.broadcasted_iota(jnp.int32, (tokens, shape.compute_tokens), 0) - jax.lax.broadcasted_iota(
                jnp.int32, (tokens, shape.compute_tokens), 1
            )
            visible = ahead >= distance
            if options.window is not None:
                visible &= ahead < distance + options.window
            if shape.buffer_tokens != ppc * ps:  # what lies past the pages would pass for the next copy's keys
                key = jax.lax.broadcasted_iota(jnp.int32, (tokens, shape.compute_tokens), 1)
                visible &= key < ppc * ps - first_local
            together = max(1, _SCORES_TOGETHER // (shape.group * tokens * shape.compute_tokens)) if shape.unroll else 1
            _each_head(
                shape,
                lambda *heads: _update_heads(
                    shape, options, tokens, heads, begin, visible, buffer, first_local, scaled, kv, highest, total, mixed
                ),
                together,
            )

        def finish(tokens: int) -> None:
            token = begin + jax.lax.broadcasted_iota(jnp.int32, (shape.group, tokens, shape.lanes), 1)
            own = (token >= item.start) & (token < item.stop)
            rows = shape.group * tokens

            def finish_head(head: jax.Array | int) -> None:
                heads = pl.ds(head * shape.group, shape.group)
                weights = total[head, :rows].sum(axis=1, keepdims=True)
                fresh = (mixed[head, :rows] / weights).reshape(shape.group, tokens, shape.lanes)
                result[heads, pl.ds(begin, tokens)] = jnp.where(own, fresh, result[heads, pl.ds(begin, tokens)])

            _each_head(shape, finish_head)

        sized(reset)
        jax.lax.fori_loop(0, num_copies, one_copy, None)
        sized(finish)

    jax.lax.fori_loop(plan[block], plan[block + 1], one_item, None)
    out[...] = result[...].astype(out.dtype)


def _each_head(shape: _Shape, act: Callable[..., None], together: int = 1) -> None:
    """``act`` of KV heads, ``together`` at a time."""
    if shape.unroll:
        for head in range(0, shape.kv_heads, together):
            act(*range(head, min(head + together, shape.kv_heads)))
    else:
        jax.lax.fori_loop(0, shape.kv_heads, lambda head, _: act(head), None)


def _update_heads(
    shape: _Shape,
    options: AttentionOptions,
    tokens: int,
    heads: Sequence[jax.Array | int],
    begin: jax.Array,
    visible: jax.Array,
    buffer: jax.Array,
    first: jax.Array,
    scaled: jax.Array,
    kv: jax.Array,
    highest: jax.Array,
    total: jax.Array,
    mixed: jax.Array,
) -> None:
    """The softmax update of some KV heads by ``compute_tokens`` keys from token ``first`` of a buffer.

    Stage by stage over the heads, not head by head: the compiler keeps that order, and each stage hides the latency of the one before.
    """
    rows, keys = shape.group * tokens, shape.compute_tokens
    precision = jax.lax.Precision.HIGHEST if shape.dtype == jnp.float32 else None

    def product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
        """Over the last axis of ``x`` and ``axis`` of ``y``."""
        return jax.lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    scores, values = [], []
    for head in heads:
        q = scaled[pl.ds(head * shape.group, shape.group), pl.ds(begin, tokens)].reshape(rows, shape.lanes).astype(shape.dtype)
        k, v = (x.astype(shape.dtype) for x in _load_head(kv, buffer, first, head, shape))
        scores.append(product(q, k, 1))
        values.append(v)
    if options.soft_cap is not None:
        scores = [jnp.tanh(s * (1 / options.soft_cap)) * options.soft_cap for s in scores]
    scores = [jnp.where(visible[None], s.reshape(shape.group, tokens, keys), _MASKED).reshape(rows, keys) for s in scores]
    before = [highest[head, :rows] for head in heads]
    now = [jnp.maximum(b, s.max(axis=1, keepdims=True)) for b, s in zip(before, scores, strict=True)]
    weights = [jnp.exp(s - _repeat_lanes(n, keys)) for s, n in zip(scores, now, strict=True)]
    gained = [product(w.astype(shape.dtype), v, 0) for w, v in zip(weights, values, strict=True)]
    for i, head in enumerate(heads):
        shrink = jnp.exp(before[i] - now[i])
        by_lane = weights[i][:, :LANES]
        for chunk in range(1, keys // LANES):
            by_lane += weights[i][:, chunk * LANES : (chunk + 1) * LANES]
        highest[head, :rows] = now[i]
        total[head, :rows] = total[head, :rows] * shrink + by_lane
        mixed[head, :rows] = mixed[head, :rows] * _repeat_lanes(shrink, shape.lanes) + gained[i]


def _repeat_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """``x`` [rows, 128], all lanes equal -> [rows, lanes]."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)


def _load_head(kv: jax.Array, buffer: jax.Array, first: jax.Array, head: jax.Array | int, shape: _Shape) -> tuple[jax.Array, jax.Array]:
    """K and V of one head [compute_tokens, lanes], from token ``first`` of a buffer: every ``stored_heads``-th row of it.

    In bfloat16, K and V of a head share 32-bit words: K is the lower half. A bfloat16 in the upper half is the same value in float32.
    Mosaic loads rows with a stride from memory of 128 lanes only, so buffers have an axis of lane tiles.
    """
    keys, heads = shape.compute_tokens, shape.stored_heads
    k_tiles, v_tiles = [], []
    for tile in range(shape.lanes // LANES):
        tokens = kv.at[buffer, tile, pl.ds(first, keys)]
        if kv.dtype == jnp.float32:
            flat = tokens.reshape(keys * 2 * heads, LANES)
            k, v = (flat[pl.ds(2 * head + plane, keys, stride=2 * heads)] for plane in range(2))
        else:
            pair = tokens.bitcast(jnp.uint32).reshape(keys * heads, LANES)[pl.ds(head, keys, stride=heads)]
            k, v = pltpu.bitcast(pair << 16, jnp.float32), pltpu.bitcast(pair & jnp.uint32(0xFFFF0000), jnp.float32)
        k_tiles.append(k)
        v_tiles.append(v)
    return jnp.concatenate(k_tiles, axis=1), jnp.concatenate(v_tiles, axis=1)
