"""What the tests of KV pages share: pages with and without a batch's new tokens, and where those go."""

from __future__ import annotations

import numpy as np

from pddkernels.kv_pages import reference
from tests.support.ragged_batches import RaggedBatch


def emptied(batch: RaggedBatch, dtype: np.dtype[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """(k_pages, v_pages) in ``dtype`` before the new tokens were stored, other bits everywhere else kept."""
    pages = []
    for source in (batch.k_pages, batch.v_pages):
        empty = source.astype(dtype)
        marks = np.full_like(batch.new_k, 7)
        reference.write_tokens(empty, marks, batch.row_starts, batch.context_lens, batch.page_tables)
        pages.append(empty)
    return pages[0], pages[1]


def new_slots(batch: RaggedBatch) -> np.ndarray:
    """Slots (page * page_size + place in the page) of the new tokens: int32 [T]."""
    page_size = batch.k_pages.shape[2]
    news = np.diff(batch.row_starts)
    slots = [
        page_table[position // page_size] * page_size + position % page_size
        for page_table, context_len, num_new in zip(batch.page_tables, batch.context_lens.tolist(), news.tolist(), strict=True)
        for position in range(context_len, context_len + num_new)
    ]
    return np.array(slots, np.int32)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)
