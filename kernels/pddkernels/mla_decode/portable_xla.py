"""Multi-head latent attention in portable XLA: static shapes, dynamic trip counts, one pass over the keys with a running softmax.

A key is a token's latent beside its rotated part and its value is the latent alone, so all heads of all queries of a block are the rows of
one product. Two-byte pages hold bits, as :mod:`pddkernels.kv_pages.portable_xla` says. Steps are cut into blocks of queries by
:func:`pddkernels.ragged_paged_attention.portable_xla.plan_query_blocks`. Slots that no query may see are replaced by zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pddkernels.kv_pages.portable_xla import decode, encode
from pddkernels.ragged_paged_attention.portable_xla import BLOCK_KEYS, DECODE_KEYS, MASKED, over_query_blocks, plan_query_blocks

Blocks = tuple[jax.Array, jax.Array]


def ragged_mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    page_tables: jax.Array,
    large: Blocks,
    small: Blocks,
    scale: float,
    kv_dtype: jnp.dtype,
) -> jax.Array:
    """``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope] float · ``latent_pages`` [N, page_size, latent], ``rope_pages``
    [N, page_size, rope] in storage form, the new tokens' KV already stored · ``page_tables`` [R, P] i32 · ``large``, ``small``: (fields,
    count) of ``plan_query_blocks``. Returns float32 [T, heads, latent]; zeros for tokens in no block.
    """

    def attend_block(block: jax.Array, table: jax.Array, position: jax.Array, length: jax.Array) -> jax.Array:
        return _attend(block, latent_pages, rope_pages, table, position, length, scale, kv_dtype, BLOCK_KEYS)

    queries = jnp.concatenate((q_latent, q_rope), -1)
    return over_query_blocks(queries, page_tables, large, small, attend_block, q_latent.shape[2])


def decode_mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    page_tables: jax.Array,
    context_lens: jax.Array,
    num_new: jax.Array,
    scale: float,
    kv_dtype: jnp.dtype,
) -> jax.Array:
    """One new token per row: ``q_latent`` [R, heads, latent], ``q_rope`` [R, heads, rope] · ``context_lens`` [R] · ``num_new`` [R]: 1, or 0
    for padding rows. Returns float32 [R, heads, latent].
    """
    queries = jnp.concatenate((q_latent, q_rope), -1)[:, None]
    return _attend(queries, latent_pages, rope_pages, page_tables, context_lens, num_new, scale, kv_dtype, DECODE_KEYS)[:, 0]


def mla_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    scale: float,
) -> jax.Array:
    """The op as :mod:`pddkernels.mla_decode.reference` defines it, planned on the host: float32 [T, heads, latent].

    Pages are in the KV dtype.
    """
    kv_dtype = latent_pages.dtype
    large, small = plan_query_blocks(row_starts, context_lens, q_latent.shape[0], len(context_lens))
    pages = encode(latent_pages, kv_dtype), encode(rope_pages, kv_dtype)
    return _ragged_jit(
        q_latent, q_rope, *pages, page_tables, (large.fields, large.count), (small.fields, small.count), scale=scale, kv_dtype=kv_dtype
    )


_ragged_jit = jax.jit(ragged_mla_attention, static_argnames=("scale", "kv_dtype"))


def _attend(
    queries: jax.Array,
    latent_pages: jax.Array,
    rope_pages: jax.Array,
    page_tables: jax.Array,
    context_lens: jax.Array,
    num_new: jax.Array,
    scale: float,
    kv_dtype: jnp.dtype,
    num_keys: int,
) -> jax.Array:
    """``queries`` [B, N, heads, latent + rope], block b's query i at position ``context_lens[b] + i``, the first ``num_new[b]`` valid.

    Returns float32 [B, N, heads, latent]; rows past ``num_new`` are arbitrary but finite if the queries are.
    """
    num_blocks, block_size, num_heads, _ = queries.shape
    _, page_size, latent_dim = latent_pages.shape
    pages_per_pass = max(1, min(num_keys // page_size, page_tables.shape[1]))
    num_keys = pages_per_pass * page_size
    page_tables = jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % pages_per_pass)))
    kv_lens = context_lens + num_new
    q = queries.astype(jnp.float32) * scale
    last_key = jnp.minimum(context_lens[:, None] + jnp.arange(block_size), kv_lens[:, None] - 1)[:, :, None, None]

    def one_pass(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, out = carry
        ids = jax.lax.dynamic_slice_in_dim(page_tables, i * pages_per_pass, pages_per_pass, 1)
        position = i * num_keys + jnp.arange(num_keys)
        planes = [
            decode(pages.at[ids].get(mode="clip"), kv_dtype).reshape(num_blocks, num_keys, -1) for pages in (latent_pages, rope_pages)
        ]
        keys = jnp.where((position < kv_lens[:, None])[:, :, None], jnp.concatenate(planes, -1), 0).astype(jnp.float32)
        scores = jnp.einsum("bnhd,bkd->bnhk", q, keys, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(position <= last_key, scores, MASKED)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.exp(scores - new_highest[..., None])
        shrink = jnp.exp(highest - new_highest)
        gained = jnp.einsum("bnhk,bkd->bnhd", weights, keys[..., :latent_dim], precision=jax.lax.Precision.HIGHEST)
        return new_highest, total * shrink + weights.sum(-1), out * shrink[..., None] + gained

    rows = (num_blocks, block_size, num_heads)
    start = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, latent_dim), jnp.float32))
    _, total, out = jax.lax.fori_loop(0, (kv_lens.max() + num_keys - 1) // num_keys, one_pass, start)
    return out / jnp.where(total > 0, total, 1)[..., None]  # total is 0 only where nothing was read: padding rows
