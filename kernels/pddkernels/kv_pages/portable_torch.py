"""KV pages in plain PyTorch operations, for any device. A pool of pages is changed in place and never copied.

Head-major pages [N, kv_heads, page_size, dim] are seen as rows of ``dim`` values; a token's head is then one row, so every move is one
gather or scatter along the first axis with an index that is the same for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def slot_rows(page_ids: np.ndarray, slots: np.ndarray, heads: np.ndarray, num_kv_heads: int, page_size: int) -> np.ndarray:
    """Row of each (token, head) in pages seen as [N * kv_heads * page_size, dim]: int64 [T * H], tokens outer.

    ``page_ids`` [T] and ``slots`` [T]: where each token lives; ``heads`` [H]: which KV heads, out of ``num_kv_heads``.
    """
    rows = (page_ids.astype(np.int64)[:, None] * num_kv_heads + heads[None, :]) * page_size + slots.astype(np.int64)[:, None]
    return rows.reshape(-1)


def new_token_rows(
    row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray, num_kv_heads: int, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 [T] of a ragged batch's new tokens, and the rows int64 [T * kv_heads] that :func:`write_rows` stores them in."""
    news = np.diff(row_starts)
    row_of_token = np.repeat(np.arange(len(news)), news)
    positions = np.arange(row_starts[-1], dtype=np.int64) + (context_lens - row_starts[:-1]).astype(np.int64)[row_of_token]
    page_ids = page_tables[row_of_token, positions // page_size]
    return positions, slot_rows(page_ids, positions % page_size, np.arange(num_kv_heads), num_kv_heads, page_size)


def write_rows(pages: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Store ``values`` [T, H, dim] of any float dtype, rounded to nearest even, in the dtype of ``pages`` [N, kv_heads, page_size, dim].

    ``rows`` [T * H] i64: where they go, see :func:`slot_rows`.
    """
    dim = pages.shape[-1]
    pages.view(-1, dim).index_copy_(0, rows, values.reshape(-1, dim).to(pages.dtype))


def gather_pages(pages: torch.Tensor, page_heads: torch.Tensor) -> torch.Tensor:
    """Whole (page, head) pieces: [len(page_heads), page_size, dim], a copy. ``page_heads`` [n] i64 counts ``page * kv_heads + head``."""
    _, _, page_size, dim = pages.shape
    return pages.view(-1, page_size * dim).index_select(0, page_heads).view(-1, page_size, dim)


def pack_tokens(layers: Sequence[torch.Tensor], rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Tokens of one plane in wire order: [layers, tokens, num_heads, dim], bit for bit, each value moved once.

    ``layers``: per layer pages [N, kv_heads, page_size, dim] · ``rows`` [tokens * num_heads] i64 of :func:`slot_rows`.
    """
    first = layers[0]
    shape = (len(layers), len(rows), first.shape[-1])
    packed = torch.empty(shape, dtype=first.dtype, device=first.device)
    for pages, layer_packed in zip(layers, packed, strict=True):
        torch.index_select(pages.view(-1, shape[2]), 0, rows, out=layer_packed)
    return packed.view(len(layers), -1, num_heads, shape[2])


def unpack_tokens(layers: Sequence[torch.Tensor], rows: torch.Tensor, values: torch.Tensor) -> None:
    """The way back: ``values`` [layers, tokens, heads, dim] in the dtype of the pages to ``rows``, every other slot untouched."""
    for pages, layer_values in zip(layers, values, strict=True):
        write_rows(pages, rows, layer_values)
