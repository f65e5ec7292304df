"""Ragged paged attention in numpy float64, query by query, from the definition: what every faster path is compared with."""

from __future__ import annotations

import numpy as np

from pddkernels.kv_pages.reference import read_tokens
from pddkernels.ragged_paged_attention.options import AttentionOptions


def ragged_paged_attention(
    queries: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """``softmax(cap(scale * q k^T)) v`` per row and head (arXiv:1706.03762, grouped as in arXiv:2305.13245): float64 [T, heads, dim].

    ``queries`` [T, heads, dim], rows back to back · ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim], the new tokens' KV already
    stored · ``row_starts`` [R+1] · ``context_lens`` [R], tokens before the new ones · ``page_tables`` [R, P] · ``sinks`` [heads] float32.
    New token i of row r stands at p = ``context_lens[r] + i`` and sees positions (p - window, p]; query head h uses KV head
    ``h // (heads / kv_heads)``. Nothing else is read.
    """
    num_tokens, num_heads, dim = queries.shape
    num_kv_heads = k_pages.shape[1]
    grouped = queries.astype(np.float64).reshape(num_tokens, num_kv_heads, -1, dim)
    out = np.empty(grouped.shape, np.float64)
    for row, context_len in enumerate(context_lens.tolist()):
        start, stop = int(row_starts[row]), int(row_starts[row + 1])
        if start == stop:
            continue
        lowest = _first_key(context_len, options.window)
        keys, values = (
            read_tokens(pages, page_tables[row], lowest, context_len + stop - start).astype(np.float64) for pages in (k_pages, v_pages)
        )
        for token in range(start, stop):
            position = context_len + token - start
            seen = slice(_first_key(position, options.window) - lowest, position + 1 - lowest)
            scores = options.scale * np.einsum("hgd,khd->hgk", grouped[token], keys[seen])
            if options.soft_cap is not None:
                scores = options.soft_cap * np.tanh(scores / options.soft_cap)
            weights = _softmax(scores, None if sinks is None else sinks.astype(np.float64).reshape(num_kv_heads, -1, 1))
            out[token] = np.einsum("hgk,khd->hgd", weights, values[seen])
    return out.reshape(num_tokens, num_heads, dim)


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Over the last axis; ``sinks`` [..., 1] are one more logit, whose weight is then dropped."""
    logits = scores if sinks is None else np.concatenate((scores, sinks), axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True))[..., : scores.shape[-1]]
