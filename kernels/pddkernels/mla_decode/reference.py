"""Multi-head latent attention in numpy float64, query by query, from the definition: what every faster path is compared with."""

from __future__ import annotations

import numpy as np


def mla_attention(
    q_latent: np.ndarray,
    q_rope: np.ndarray,
    latent_pages: np.ndarray,
    rope_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    scale: float,
) -> np.ndarray:
    """``softmax(scale * (q_latent c^T + q_rope r^T)) c`` per row and head (arXiv:2405.04434, section 2.1, with each head's up-projections
    absorbed into its query and its output): float64 [T, heads, latent].

    ``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope], rows back to back · ``latent_pages`` [N, page_size, latent],
    ``rope_pages`` [N, page_size, rope], the new tokens' KV already stored · ``row_starts`` [R+1] · ``context_lens`` [R], tokens
    before the new ones · ``page_tables`` [R, P]. New token i of row r sees positions 0 .. ``context_lens[r] + i``. Nothing else is read.
    """
    out = np.empty(q_latent.shape, np.float64)
    page_size = latent_pages.shape[1]
    for row, context_len in enumerate(context_lens.tolist()):
        for token in range(int(row_starts[row]), int(row_starts[row + 1])):
            positions = np.arange(context_len + token - int(row_starts[row]) + 1)
            at = (page_tables[row][positions // page_size], positions % page_size)
            latents, ropes = latent_pages[at].astype(np.float64), rope_pages[at].astype(np.float64)
            scores = scale * (q_latent[token].astype(np.float64) @ latents.T + q_rope[token].astype(np.float64) @ ropes.T)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[token] = weights / weights.sum(-1, keepdims=True) @ latents
    return out
