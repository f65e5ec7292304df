"""Ragged paged attention in numpy float64, row by row, from the definition: what every faster path is compared with."""

from __future__ import annotations

import numpy as np

from pddkernels.kv_pages.reference import read_tokens


def ragged_paged_attention(
    queries: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    scale: float,
) -> np.ndarray:
    """``softmax(scale * q k^T) v`` per row and head (arXiv:1706.03762, grouped as in arXiv:2305.13245): float64 [T, heads, dim].

    ``queries`` [T, heads, dim], rows back to back · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim], the new tokens' KV already
    stored · ``row_starts`` [R+1] · ``context_lens`` [R], tokens before the new ones · ``page_tables`` [R, P]. New token i of row r attends
    to positions 0 .. ``context_lens[r] + i``; query head h uses KV head ``h // (heads / kv_heads)``. Nothing else is read.
    """
    out = np.empty(queries.shape, np.float64)
    group = queries.shape[1] // k_pages.shape[1]
    for row, context_len in enumerate(context_lens):
        for i, token in enumerate(range(row_starts[row], row_starts[row + 1])):
            kv_len = int(context_len) + i + 1
            keys = read_tokens(k_pages, page_tables[row], 0, kv_len).astype(np.float64)
            values = read_tokens(v_pages, page_tables[row], 0, kv_len).astype(np.float64)
            for head in range(queries.shape[1]):
                scores = scale * (keys[:, head // group] @ queries[token, head].astype(np.float64))
                weights = np.exp(scores - scores.max())
                out[token, head] = (weights / weights.sum()) @ values[:, head // group]
    return out
