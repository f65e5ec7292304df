"""KV pages in numpy, one token at a time: what every faster path is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def write_tokens(pages: np.ndarray, values: np.ndarray, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> None:
    """Store the new tokens of a ragged batch, rounded to the dtype of ``pages`` (numpy and ml_dtypes round to nearest even).

    ``pages`` [N, kv_heads, page_size, dim], changed in place · ``values`` [T, kv_heads, dim], rows back to back · ``row_starts`` [R+1] ·
    ``context_lens`` [R] · ``page_tables`` [R, P]: new token i of row r goes to position ``context_lens[r] + i``.
    """
    page_size = pages.shape[2]
    for row, context_len in enumerate(context_lens):
        for i, token in enumerate(range(row_starts[row], row_starts[row + 1])):
            position = int(context_len) + i
            pages[page_tables[row, position // page_size], :, position % page_size] = values[token].astype(pages.dtype)


def read_tokens(pages: np.ndarray, page_table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Tokens [start, stop) of one request: [stop - start, kv_heads, dim], from ``pages`` [N, kv_heads, page_size, dim]."""
    page_size = pages.shape[2]
    out = np.empty((stop - start, pages.shape[1], pages.shape[3]), pages.dtype)
    for i, position in enumerate(range(start, stop)):
        out[i] = pages[page_table[position // page_size], :, position % page_size]
    return out


def pack_tokens(layers: Sequence[np.ndarray], page_table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Tokens [start, stop) of one plane in wire order: [layers, stop - start, kv_heads, dim], bit for bit. ``layers``: pages per layer."""
    return np.stack([read_tokens(pages, page_table, start, stop) for pages in layers])


def unpack_tokens(layers: Sequence[np.ndarray], values: np.ndarray, page_table: np.ndarray, start: int) -> None:
    """The way back: ``values`` [layers, tokens, kv_heads, dim] to positions from ``start`` on, every other slot untouched."""
    page_size = layers[0].shape[2]
    for pages, layer_values in zip(layers, values, strict=True):
        for position, token in enumerate(layer_values, start):
            pages[page_table[position // page_size], :, position % page_size] = token
