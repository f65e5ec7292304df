"""One call of the engine's attention on arrays of the host: what conformance compares with the float64 reference on the user's device."""

from __future__ import annotations

import jax
import numpy as np

from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.portable_xla import ragged_paged_attention


def path(device: str) -> str:
    """Which implementation the engine uses on ``device``."""
    return "portable"


def attend(
    device: str,
    queries: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    row_starts: np.ndarray,
    context_lens: np.ndarray,
    page_tables: np.ndarray,
    options: AttentionOptions,
) -> np.ndarray:
    """The op as :mod:`pddkernels.ragged_paged_attention.reference` defines it: float32 [T, heads, dim].

    ``k_pages``, ``v_pages`` [N, kv_heads, page_size, dim] go into the engine's own layout first.
    """
    num_pages, num_kv_heads, page_size, dim = k_pages.shape
    # [N, page_size, kv_heads, 2, dim]: k0 v0 k1 v1 ...
    pages = np.stack((k_pages, v_pages), axis=2).transpose(0, 3, 1, 2, 4).reshape(num_pages, page_size, 2 * num_kv_heads, dim)
    with jax.default_device(jax.devices(device)[0]):
        out = ragged_paged_attention(jax.numpy.asarray(queries), jax.numpy.asarray(pages), row_starts, context_lens, page_tables, options)
    return np.asarray(out, np.float32)
