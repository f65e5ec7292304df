"""KV pages in portable XLA: store, read, place and copy tokens of one layer's interleaved pages, shapes static, pages updated in place.

``pages`` is [num_pages, page_size, 2 * kv_heads, dim], heads interleaved k0 v0 k1 v1 .... A *slot* is ``page * page_size`` plus the
place in the page; a slot past the pool (``num_pages * page_size`` or more) is padding: it reads as zeros and is never written. Two-byte
dtypes are kept as bits in uint16, since XLA:CPU computes a bfloat16 gather or scatter by converting the whole pool to float32 (measured:
50 ms a decode step instead of 2). What is read is bit for bit what was written.

Call these under ``jax.jit`` with the pages donated: then every one of them updates in place and its time does not depend on ``num_pages``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def storage_dtype(kv_dtype: jnp.dtype) -> jnp.dtype:
    """What the pages array of a KV dtype holds: uint16 bits for two-byte floats, the dtype itself otherwise."""
    return jnp.dtype(jnp.uint16) if kv_dtype.itemsize == 2 else kv_dtype


def encode(values: jax.Array, kv_dtype: jnp.dtype) -> jax.Array:
    """Round to the KV dtype (nearest even) and give its storage form."""
    rounded = values.astype(kv_dtype)
    return jax.lax.bitcast_convert_type(rounded, storage_dtype(kv_dtype)) if kv_dtype.itemsize == 2 else rounded


def decode(stored: jax.Array, kv_dtype: jnp.dtype) -> jax.Array:
    """Storage form back to values of the KV dtype, exact."""
    return jax.lax.bitcast_convert_type(stored, kv_dtype) if kv_dtype.itemsize == 2 else stored


def interleave(keys: jax.Array, values: jax.Array) -> jax.Array:
    """[T, kv_heads, dim] each -> [T, 2 * kv_heads, dim], k0 v0 k1 v1 ...."""
    num_tokens, num_heads, dim = keys.shape
    return jnp.stack((keys, values), axis=2).reshape(num_tokens, 2 * num_heads, dim)


def append(pages: jax.Array, keys: jax.Array, values: jax.Array, slots: jax.Array, kv_dtype: jnp.dtype) -> jax.Array:
    """Store new tokens: ``keys``, ``values`` [T, kv_heads, dim] float, ``slots`` [T] i32, different from each other, padding included."""
    return put(pages, encode(interleave(keys, values), kv_dtype), slots)


def put(pages: jax.Array, stored: jax.Array, slots: jax.Array) -> jax.Array:
    """Write ``stored`` [T, 2 * kv_heads, dim], already in storage form, to ``slots`` [T] i32."""
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[slots].set(stored, mode="drop", unique_indices=True).reshape(pages.shape)


def gather(pages: jax.Array, slots: jax.Array) -> jax.Array:
    """Read ``slots`` [T] i32 -> [T, 2 * kv_heads, dim] in storage form."""
    return pages.reshape(-1, *pages.shape[2:]).at[slots].get(mode="fill", fill_value=0)


def place(pages: jax.Array, stored: jax.Array, wanted: jax.Array, slots: jax.Array) -> jax.Array:
    """Write ``stored`` [T, 2 * kv_heads, dim] to ``slots`` where ``wanted`` [2 * kv_heads] bool; the other heads and planes stay."""
    return put(pages, jnp.where(wanted[None, :, None], stored, gather(pages, slots)), slots)


def copy_page(pages: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """Copy all slots of page ``source`` (scalar i32) over page ``destination`` (scalar i32)."""
    page_size = pages.shape[1]
    offsets = jnp.arange(page_size, dtype=jnp.int32)
    return put(pages, gather(pages, source * page_size + offsets), destination * page_size + offsets)


def pack_tokens(layers: Sequence[jax.Array], slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``slots`` [T] i32 of every layer in wire order: keys and values [layers, T, kv_heads, dim] each, in storage form."""
    stored = jnp.stack([gather(pages, slots) for pages in layers])
    return stored[:, :, 0::2], stored[:, :, 1::2]


def unpack_tokens(layers: Sequence[jax.Array], keys: jax.Array, values: jax.Array, slots: jax.Array) -> list[jax.Array]:
    """The way back: every layer's pages with ``keys``, ``values`` [layers, T, kv_heads, dim], in storage form, at ``slots`` [T] i32."""
    return [put(pages, interleave(k, v), slots) for pages, k, v in zip(layers, keys, values, strict=True)]
