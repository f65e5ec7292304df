"""What the tests of KV pages share: pages with and without a batch's new tokens, and where those go; token ranges to pack and unpack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

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


@dataclass(frozen=True)
class RangeSpec:
    """Tokens [start, start + num_tokens) of a request in a pool of several layers."""

    start: int
    num_tokens: int
    num_kv_heads: int
    dim: int
    page_size: int
    seed: int = 0


# A whole page, one token, across a boundary, nothing; the page size is the number of heads.
RANGES = (RangeSpec(0, 4, 4, 4, 4), RangeSpec(7, 1, 4, 4, 4), RangeSpec(3, 6, 4, 4, 4), RangeSpec(5, 0, 4, 4, 4))

range_specs = st.builds(
    RangeSpec,
    start=st.integers(0, 40),
    num_tokens=st.integers(0, 40),
    num_kv_heads=st.integers(1, 4),
    dim=st.sampled_from((1, 4, 10, 64)),
    page_size=st.sampled_from((1, 3, 4, 12, 16)),
    seed=st.integers(0, 2**16),
)


@dataclass(frozen=True)
class TokenPages:
    """``k_pages``, ``v_pages``: per layer [N, kv_heads, page_size, dim] of random bits, NaN among them · ``page_table`` [P] i32."""

    k_pages: tuple[np.ndarray, ...]
    v_pages: tuple[np.ndarray, ...]
    page_table: np.ndarray


def make_token_pages(spec: RangeSpec, dtype: np.dtype[np.generic], num_layers: int = 3) -> TokenPages:
    rng = np.random.default_rng(spec.seed)
    num_pages = -(-(spec.start + spec.num_tokens) // spec.page_size) + 4
    shape = (num_layers, num_pages, spec.num_kv_heads, spec.page_size, spec.dim)

    def pages() -> tuple[np.ndarray, ...]:
        return tuple(np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy())

    return TokenPages(pages(), pages(), rng.permutation(num_pages)[: num_pages - 4].astype(np.int32))


def range_slots(spec: RangeSpec, page_table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Page ids and places in the page of the range's tokens, [num_tokens] each."""
    positions = np.arange(spec.start, spec.start + spec.num_tokens)
    return page_table[positions // spec.page_size], positions % spec.page_size
