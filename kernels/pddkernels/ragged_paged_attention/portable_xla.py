"""Ragged paged attention in portable XLA: static shapes, dynamic trip counts, so one program serves any context length.

``attend`` is the one computation: a batch of query blocks against the pages of their rows, softmax in one pass over the keys
(arXiv:2205.14135), float32. A decode step is one batch of one-token blocks. A ragged step is cut into blocks on the host
(:func:`plan_query_blocks`), large ones for prefill chunks and small ones for what is left, and looped over, so a decode row beside a chunk
costs a small block and not a large one.

Pages are as in :mod:`pddkernels.kv_pages.portable_xla`. Masked keys *and* values are replaced by zero, so NaN in unused slots cannot leak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pddkernels.kv_pages.portable_xla import decode, encode
from pddkernels.ragged_paged_attention.options import AttentionOptions

LARGE_BLOCK: Final = 128  # queries; amortises reading a row's keys. Measured on 2 AVX-512 cores: 32 takes 1.6 times as long
SMALL_BLOCK: Final = 16
# A remainder of more tokens than this gets a large block: two small blocks read the keys twice, three cost as much as a large one.
SMALL_REMAINDER: Final = 2 * SMALL_BLOCK
DECODE_KEYS: Final = 128  # keys per pass of the loop, in tokens
BLOCK_KEYS: Final = 256
MASKED: Final = -1e30  # finite: a row of nothing but masked scores must not become NaN

_Fields = tuple[int, int, int, int]


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of one size: ``fields`` [max_blocks, 4] i32 = (row, first token, tokens, first position), ``count`` of them valid."""

    fields: np.ndarray
    count: np.int32


def max_blocks(num_tokens: int, max_rows: int) -> tuple[int, int]:
    """Most (large, small) blocks that any step of up to ``num_tokens`` tokens and ``max_rows`` rows can have."""
    return max(1, num_tokens // (SMALL_REMAINDER + 1)), min(num_tokens, 2 * max_rows)


def plan_query_blocks(row_starts: np.ndarray, context_lens: np.ndarray, num_tokens: int, max_rows: int) -> tuple[QueryBlocks, QueryBlocks]:
    """Cut rows into (large, small) blocks. ``row_starts`` [R+1], ``context_lens`` [R]; array sizes follow from the last two arguments."""
    large: list[_Fields] = []
    small: list[_Fields] = []
    for row, context_len in enumerate(context_lens.tolist()):
        start, stop = int(row_starts[row]), int(row_starts[row + 1])
        token = start
        while token < stop:
            is_large = stop - token > SMALL_REMAINDER
            size = min(LARGE_BLOCK if is_large else SMALL_BLOCK, stop - token)
            (large if is_large else small).append((row, token, size, context_len + token - start))
            token += size
    max_large, max_small = max_blocks(num_tokens, max_rows)
    return _padded(large, max_large), _padded(small, max_small)


def ragged_attention(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    large: tuple[jax.Array, jax.Array],
    small: tuple[jax.Array, jax.Array],
    options: AttentionOptions,
    kv_dtype: jnp.dtype,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """``queries`` [T, heads, dim] float, the new tokens' KV already stored · ``page_tables`` [R, P] i32 · ``large``, ``small``:
    (fields, count) of :func:`plan_query_blocks` · ``sinks`` [heads] float32. Returns float32 [T, heads, dim]; zeros for tokens in no block.
    """

    def attend_block(block: jax.Array, table: jax.Array, position: jax.Array, length: jax.Array) -> jax.Array:
        return attend(block, pages, table, position, length, options, kv_dtype, BLOCK_KEYS, sinks)

    return over_query_blocks(queries, page_tables, large, small, attend_block, queries.shape[2])


def over_query_blocks(
    queries: jax.Array,
    page_tables: jax.Array,
    large: tuple[jax.Array, jax.Array],
    small: tuple[jax.Array, jax.Array],
    attend_block: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array],
    out_dim: int,
) -> jax.Array:
    """Run ``attend_block`` over all blocks of a step: float32 [T, heads, out_dim], zeros for tokens in no block.

    ``attend_block`` takes queries [1, N, heads, dim], a page table [1, P], a first position [1] and a number of valid queries [1]; it gives
    [1, N, heads, out_dim].
    """
    num_tokens = queries.shape[0]
    # Blocks are read and written whole; the margin keeps the last one from being shifted back by the bounds check of dynamic slices.
    padded = jnp.pad(queries.astype(jnp.float32), ((0, LARGE_BLOCK), (0, 0), (0, 0)))
    out = jnp.zeros((*padded.shape[:2], out_dim), jnp.float32)
    for (fields, count), size in ((large, LARGE_BLOCK), (small, SMALL_BLOCK)):

        def one_block(i: jax.Array, out: jax.Array, fields: jax.Array = fields, size: int = size) -> jax.Array:
            row, token, length, position = fields[i, 0], fields[i, 1], fields[i, 2], fields[i, 3]
            block = jax.lax.dynamic_slice_in_dim(padded, token, size, 0)
            table = jax.lax.dynamic_slice_in_dim(page_tables, row, 1, 0)
            fresh = attend_block(block[None], table, position[None], length[None])[0]
            # A block's rows past its length belong to the next block.
            stale = jax.lax.dynamic_slice_in_dim(out, token, size, 0)
            merged = jnp.where((jnp.arange(size) < length)[:, None, None], fresh, stale)
            return jax.lax.dynamic_update_slice_in_dim(out, merged, token, 0)

        out = jax.lax.fori_loop(0, count, one_block, out)
    return out[:num_tokens]


def decode_attention(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    context_lens: jax.Array,
    num_new: jax.Array,
    options: AttentionOptions,
    kv_dtype: jnp.dtype,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """One new token per row: ``queries`` [R, heads, dim] · ``context_lens`` [R] · ``num_new`` [R]: 1, or 0 for padding rows ·
    ``sinks`` [heads] float32.

    Returns float32 [R, heads, dim].
    """
    return attend(queries[:, None], pages, page_tables, context_lens, num_new, options, kv_dtype, DECODE_KEYS, sinks)[:, 0]


def attend(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    context_lens: jax.Array,
    num_new: jax.Array,
    options: AttentionOptions,
    kv_dtype: jnp.dtype,
    num_keys: int,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """``queries`` [B, N, heads, dim], block b's query i at position ``context_lens[b] + i``, the first ``num_new[b]`` of them valid ·
    ``page_tables`` [B, P] i32 · about ``num_keys`` keys are read per pass · ``sinks`` [heads] float32. Returns float32 [B, N, heads, dim];
    rows past ``num_new`` are arbitrary but finite if the queries are. Pages wholly before a block's window are skipped.
    """
    num_blocks, block_size, num_heads, dim = queries.shape
    _, page_size, planes, _ = pages.shape
    kv_heads = planes // 2
    group = num_heads // kv_heads
    pages_per_pass = max(1, min(num_keys // page_size, page_tables.shape[1]))
    num_keys = pages_per_pass * page_size
    page_tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % pages_per_pass)))
    kv_lens = context_lens + num_new
    if options.window is not None:
        # Each block's table starts with the page of the first key that its first query sees.
        lowest = jnp.maximum(context_lens - options.window + 1, 0)
        first_pages = lowest // page_size
        columns = first_pages[:, None] + jnp.arange(page_tables.shape[1])
        page_tables = jnp.take_along_axis(page_tables, columns, axis=1, mode="clip")
        offsets = first_pages * page_size
        num_passes = ((kv_lens - offsets).max() + num_keys - 1) // num_keys
    else:
        num_passes = (kv_lens.max() + num_keys - 1) // num_keys

    # Matrix rows of a KV head are its group's queries: [B, kv_heads, group * N, dim].
    q = queries.astype(jnp.float32).reshape(num_blocks, block_size, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(num_blocks, kv_heads, group * block_size, dim) * options.scale
    last_key = jnp.minimum(context_lens[:, None] + jnp.arange(block_size), kv_lens[:, None] - 1)
    last_key = jnp.tile(last_key, (1, group))[:, None, :, None]

    def one_pass(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, out = carry
        ids = jax.lax.dynamic_slice_in_dim(page_tables, i * pages_per_pass, pages_per_pass, 1)
        # Whole pages as one dimension: XLA:CPU then gathers at the speed of a copy, five times faster than by element.
        gathered = pages.reshape(pages.shape[0], -1).at[ids].get(mode="clip")
        kv = decode(gathered, kv_dtype).reshape(num_blocks, num_keys, kv_heads, 2, dim)
        position = i * num_keys + jnp.arange(num_keys)
        if options.window is None:
            stored = position < kv_lens[:, None]
            seen = position <= last_key
        else:
            position = offsets[:, None] + position
            stored = (position >= lowest[:, None]) & (position < kv_lens[:, None])
            position = position[:, None, None, :]
            seen = (position <= last_key) & (position > last_key - options.window)
        kv = jnp.where(stored[:, :, None, None, None], kv, 0).astype(jnp.float32).transpose(3, 0, 2, 1, 4)
        scores = jnp.einsum("bhmd,bhkd->bhmk", q, kv[0], precision=jax.lax.Precision.HIGHEST)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - new_highest[..., None])
        shrink = jnp.exp(highest - new_highest)
        gained = jnp.einsum("bhmk,bhkd->bhmd", weights, kv[1], precision=jax.lax.Precision.HIGHEST)
        return new_highest, total * shrink + weights.sum(-1), out * shrink[..., None] + gained

    rows = (num_blocks, kv_heads, group * block_size)
    if sinks is None:
        highest, total = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)
    else:  # as if one key with this score and no value had been read already
        by_row = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(kv_heads, group, 1), (kv_heads, group, block_size))
        highest, total = jnp.broadcast_to(by_row.reshape(rows[1:]), rows), jnp.ones(rows, jnp.float32)
    _, total, out = jax.lax.fori_loop(0, num_passes, one_pass, (highest, total, jnp.zeros((*rows, dim), jnp.float32)))
    out = out / jnp.where(total > 0, total, 1)[..., None]  # total is 0 only where nothing was read: padding rows
    return out.reshape(num_blocks, kv_heads, group, block_size, dim).transpose(0, 3, 1, 2, 4).reshape(queries.shape)


def ragged_paged_attention(
    queries: jax.Array,
    kv_pages: jax.Array,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, planned on the host: float32 [T, heads, dim].

    ``queries`` [T, heads, dim] · ``kv_pages`` [pages, page_size, 2 * kv_heads, dim] in the KV dtype (float32, bfloat16, float16), the new
    tokens' KV already stored · ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] i32 on the host · ``sinks`` [heads]
    float32.
    """
    kv_dtype = kv_pages.dtype
    large, small = plan_query_blocks(row_starts, context_lens, queries.shape[0], len(context_lens))
    pages = encode(kv_pages, kv_dtype)
    return _ragged_jit(queries, pages, page_tables, (large.fields, large.count), (small.fields, small.count), options, kv_dtype.name, sinks)


def _ragged(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    large: tuple[jax.Array, jax.Array],
    small: tuple[jax.Array, jax.Array],
    options: AttentionOptions,
    kv_dtype: str,
    sinks: jax.Array | None,
) -> jax.Array:
    return ragged_attention(queries, pages, page_tables, large, small, options, jnp.dtype(kv_dtype), sinks)


_ragged_jit = jax.jit(_ragged, static_argnames=("options", "kv_dtype"))


def _padded(blocks: list[_Fields], limit: int) -> QueryBlocks:
    fields = np.zeros((limit, 4), np.int32)
    fields[: len(blocks)] = np.asarray(blocks, np.int32).reshape(-1, 4)
    return QueryBlocks(fields, np.int32(len(blocks)))
