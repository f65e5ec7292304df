"""One call of the engine's attention on arrays of the host: what conformance compares with the float64 reference on the user's device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pddkernels.jax_ops import choose
from pddkernels.ragged_paged_attention.options import AttentionOptions


def attend(
    device: str,
    queries: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
) -> tuple[np.ndarray, str]:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it, by the path that an engine takes for these shapes and dtypes
    on ``device``: float32 [T, heads, dim], and the path's name with what was counted as a fallback. Rows of one new token each go the way
    of a decode step. The engine's own append puts keys and values into its layout.
    """
    on = jax.devices(device)[0]
    num_pages, kv_heads, page_size, dim = k_pages.shape
    num_rows, pages_per_row = page_tables.shape
    ops = choose(
        on,
        num_heads=queries.shape[1],
        kv_heads=kv_heads,
        head_dim=dim,
        kv_dtype=jnp.dtype(k_pages.dtype),
        max_rows=num_rows,
        pages_per_row=pages_per_row,
    )
    # By slot [N * page_size, kv_heads, dim]; NaN where no row may read stays NaN.
    keys, values = (np.ascontiguousarray(pages.transpose(0, 2, 1, 3)).reshape(-1, kv_heads, dim) for pages in (k_pages, v_pages))
    slots = np.arange(len(keys), dtype=np.int32)
    with jax.default_device(on):
        pages = jax.jit(ops.append)(jnp.zeros((num_pages, page_size, *ops.token_shape), ops.storage_dtype), keys, values, slots)
        if len(queries) == num_rows:
            ones = np.ones(num_rows, np.int32)
            out = jax.jit(ops.attend_decode, static_argnames="options")(queries, pages, page_tables, context_lens, ones, options=options)
        else:
            plan = ops.plan(row_starts, context_lens, len(queries), num_rows)
            out = jax.jit(ops.attend, static_argnames="options")(queries, pages, page_tables, plan, options=options)
    return np.asarray(out, np.float32), ", ".join((ops.path, *ops.fallbacks))
