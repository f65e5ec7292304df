"""Multi-head latent attention for TPU in Pallas: rows, items and page copies as in :mod:`pddkernels.ragged_paged_attention.pallas`.

All heads share a key (a token's latent beside its rotated part) and a value (the latent), so the rows of one product are heads times
tokens. Tokens lead, [tokens, heads, latent]: a decode row computes its heads alone, anything longer a whole query block. Pages are two
planes; the rotated part is padded to 128 lanes in HBM, with finite values, as XLA pads it anyhow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pddkernels.ragged_paged_attention.pallas import LANES, Item, item_at, padded_dim, plan_items

_QUERY_TOKENS: Final = 8  # of 128 heads: 1,024 matrix rows
_COPY_TOKENS: Final = 1024
_UPDATE_TOKENS: Final = 256
_VMEM_LIMIT_BYTES: Final = 48 * 2**20  # three quarters of the smallest: a v5p's 64 MiB
_MASKED: Final = -1e30


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    row_starts: jax.Array,
    context_lens: jax.Array,
    page_tables: jax.Array,
    num_rows: jax.Array,
    scale: float,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The op as :mod:`pddkernels.mla_decode.reference` defines it: [T, heads, latent] in the queries' dtype.

    ``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope] · ``latent_pages`` [N, page_size, latent], ``rope_pages`` [N, page_size,
    rope or more], the new tokens' KV already stored, float32 or bfloat16 · ``row_starts`` [R + 1], ``context_lens`` [R], ``page_tables``
    [R, P], ``num_rows`` [1] i32: rows past ``num_rows`` are ignored. Tokens of no row give zeros. A compiled kernel needs page sizes and
    heads that are multiples of 16 and page dims that are multiples of 128; ValueError otherwise.
    """
    num_tokens, num_heads, latent = q_latent.shape
    page_size = latent_pages.shape[1]
    if interpret:
        latent_pages, rope_pages = (_pad_lanes(pages, padded_dim(pages.shape[2])) for pages in (latent_pages, rope_pages))
    lanes, rope_lanes = latent_pages.shape[2], rope_pages.shape[2]
    if not interpret and (page_size % 16 or num_heads % 16 or lanes % LANES or rope_lanes % LANES):
        raise ValueError(f"given pages of {page_size} tokens, dims {lanes} and {rope_lanes}, {num_heads} heads; see the docstring")
    num_blocks = -(-num_tokens // _QUERY_TOKENS)
    padding = num_blocks * _QUERY_TOKENS - num_tokens
    queries = [jnp.pad(_pad_lanes(q, width), ((0, padding), (0, 0), (0, 0))) for q, width in ((q_latent, lanes), (q_rope, rope_lanes))]
    plan = plan_items(row_starts, context_lens, num_rows, num_blocks, _QUERY_TOKENS, page_size, None, 1)
    pages_per_update = max(1, _UPDATE_TOKENS // page_size)
    pages_per_copy = max(pages_per_update, _COPY_TOKENS // page_size // pages_per_update * pages_per_update)
    kernel = functools.partial(
        _kernel,
        scale=scale,
        num_blocks=num_blocks,
        max_items=num_blocks + context_lens.shape[0],
        table_width=page_tables.shape[1],
        pages_per_update=pages_per_update,
    )
    rows = _QUERY_TOKENS * num_heads
    blocks = [pl.BlockSpec((_QUERY_TOKENS, num_heads, width), lambda i, *_: (i, 0, 0)) for width in (lanes, rope_lanes)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(queries[0].shape, q_latent.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks,),
            in_specs=[*blocks, anywhere, anywhere],
            out_specs=blocks[0],
            scratch_shapes=[
                pltpu.VMEM((2, pages_per_copy, page_size, lanes), latent_pages.dtype),
                pltpu.VMEM((2, pages_per_copy, page_size, rope_lanes), rope_pages.dtype),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT_BYTES),
        interpret=interpret,
        name="pdd_mla_attention",
    )(plan, page_tables.reshape(-1), *queries, latent_pages, rope_pages)
    return out[:num_tokens, :, :latent]


def _kernel(
    plan: jax.Array,
    tables: jax.Array,
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    out: jax.Array,
    latents: jax.Array,
    ropes: jax.Array,
    highest: jax.Array,
    total: jax.Array,
    mixed: jax.Array,
    copied: jax.Array,
    turn: jax.Array,
    *,
    scale: float,
    num_blocks: int,
    max_items: int,
    table_width: int,
    pages_per_update: int,
) -> None:
    block = pl.program_id(0)
    num_heads, lanes = q_latent.shape[1:]
    _, ppc, ps, _ = latents.shape
    update_tokens = pages_per_update * ps
    dtype = jnp.promote_types(q_latent.dtype, latents.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    items_end = plan[num_blocks]

    def item(i: jax.Array) -> Item:
        return item_at(plan, i, num_blocks, max_items)

    def each_copy(of: Item, j: jax.Array, buffer: jax.Array, *, wait: bool) -> None:
        first = of.first_page + j * ppc

        def one(k: jax.Array, _: None) -> None:
            page = tables[of.row * table_width + first + k]
            for plane, (source, kept) in enumerate(((latent_pages, latents), (rope_pages, ropes))):
                copy = pltpu.make_async_copy(source.at[page], kept.at[buffer, k], copied.at[plane, buffer])
                if wait:
                    copy.wait()
                else:
                    copy.start()

        jax.lax.fori_loop(0, jnp.minimum(of.end_page - first, ppc), one, None)

    @pl.when(block == 0)
    def _first_copy() -> None:
        turn[0] = 0
        pl.when(items_end > 0)(lambda: each_copy(item(jnp.int32(0)), jnp.int32(0), jnp.int32(0), wait=False))

    out[...] = jnp.zeros_like(out)

    def one_item(i: jax.Array, _: None) -> None:
        of = item(i)
        num_copies = pl.cdiv(of.end_page - of.first_page, ppc)
        is_single = of.stop == of.start + 1
        begin = jnp.where(is_single, of.start, 0)

        def sized(act: Callable[[int], None]) -> None:
            pl.when(is_single)(lambda: act(1))
            pl.when(jnp.logical_not(is_single))(lambda: act(_QUERY_TOKENS))

        def reset(tokens: int) -> None:
            rows = tokens * num_heads
            highest[:rows] = jnp.full((rows, LANES), _MASKED, jnp.float32)
            total[:rows] = jnp.zeros((rows, LANES), jnp.float32)
            mixed[:rows] = jnp.zeros((rows, lanes), jnp.float32)

        def one_copy(j: jax.Array, _: None) -> None:
            buffer = turn[0]
            turn[0] = 1 - buffer
            is_last = j + 1 == num_copies
            following = jnp.where(is_last, i + 1, i)
            pl.when(following < items_end)(lambda: each_copy(item(following), jnp.where(is_last, 0, j + 1), 1 - buffer, wait=False))
            each_copy(of, j, buffer, wait=True)
            origin = (of.first_page + j * ppc) * ps
            stored = jnp.minimum(of.base + of.stop - origin, ppc * ps)
            num_updates = pl.cdiv(stored, update_tokens)

            @pl.when(stored < num_updates * update_tokens)
            def _clear() -> None:
                """What lies past the last token may be NaN, and NaN times a weight of zero is NaN."""
                here = (buffer, pl.ds((num_updates - 1) * pages_per_update, pages_per_update))
                shape = (pages_per_update, ps, lanes)
                token = (num_updates - 1) * update_tokens + sum(
                    jax.lax.broadcasted_iota(jnp.int32, shape, axis) * size for axis, size in ((0, ps), (1, 1))
                )
                latents[here] = jnp.where(token < stored, latents[here].astype(jnp.float32), 0).astype(latents.dtype)

            sized(lambda tokens: jax.lax.fori_loop(0, num_updates, functools.partial(update, tokens, buffer, origin), None))

        def update(tokens: int, buffer: jax.Array, origin: jax.Array, u: jax.Array, _: None) -> None:
            rows = tokens * num_heads

            def product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
                return jax.lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

            here = (buffer, pl.ds(u * pages_per_update, pages_per_update))
            latent, rope = (kept[here].reshape(update_tokens, kept.shape[3]).astype(dtype) for kept in (latents, ropes))
            scores = sum(
                product(q[pl.ds(begin, tokens)].reshape(rows, q.shape[2]).astype(dtype), key, 1)
                for q, key in ((q_latent, latent), (q_rope, rope))
            )
            shape = (tokens, num_heads, update_tokens)
            # Query token t stands at base + begin + t, key k at origin + u * update_tokens + k.
            ahead = jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 2)
            visible = ahead >= origin + u * update_tokens - of.base - begin
            scores = jnp.where(visible, scores.reshape(shape) * scale, _MASKED).reshape(rows, update_tokens)
            before = highest[:rows]
            now = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            shrink = jnp.exp(before - now)
            weights = jnp.exp(scores - now[:, :1])
            highest[:rows] = now
            total[:rows] = total[:rows] * shrink + weights.sum(axis=1, keepdims=True)
            mixed[:rows] = mixed[:rows] * shrink[:, :1] + product(weights.astype(dtype), latent, 0)

        def finish(tokens: int) -> None:
            rows, here = tokens * num_heads, pl.ds(begin, tokens)
            fresh = (mixed[:rows] / total[:rows, :1]).reshape(tokens, num_heads, lanes)
            token = begin + jax.lax.broadcasted_iota(jnp.int32, fresh.shape, 0)
            own = (token >= of.start) & (token < of.stop)
            out[here] = jnp.where(own, fresh, out[here].astype(jnp.float32)).astype(out.dtype)

        sized(reset)
        jax.lax.fori_loop(0, num_copies, one_copy, None)
        sized(finish)

    jax.lax.fori_loop(plan[block], plan[block + 1], one_item, None)


def _pad_lanes(x: jax.Array, lanes: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, lanes - x.shape[2])))
