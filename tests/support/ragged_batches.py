"""Ragged batches over paged KV for kernel tests: unequal rows, pages in random order, NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class RowSpec:
    """``context_len`` tokens in KV already, then ``num_new``."""

    context_len: int
    num_new: int


@dataclass(frozen=True)
class BatchSpec:
    """What a batch looks like. ``share_prefix``: rows whose context fills whole pages share row 0's first page, as a prefix cache does."""

    rows: tuple[RowSpec, ...]
    num_kv_heads: int
    group: int
    dim: int
    page_size: int
    seed: int = 0
    share_prefix: bool = False


@dataclass(frozen=True)
class RaggedBatch:
    """The arguments of the op: float32 values; ``new_k``, ``new_v`` [T, kv_heads, dim] are the new tokens' KV, already in the pages."""

    queries: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    row_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray
    new_k: np.ndarray
    new_v: np.ndarray
    scale: float

    def rounded(self) -> RaggedBatch:
        """The same with queries and pages in bfloat16."""
        as_bfloat16 = {name: getattr(self, name).astype(ml_dtypes.bfloat16) for name in ("queries", "k_pages", "v_pages")}
        return replace(self, **as_bfloat16)


def make_batch(spec: BatchSpec) -> RaggedBatch:
    """Every slot no row may read is NaN, in pages of the batch and in pages of nobody; page 0, which pads the tables, is all NaN."""
    rng = np.random.default_rng(spec.seed)
    num_used = [-(-(row.context_len + row.num_new) // spec.page_size) for row in spec.rows]
    num_pages = 1 + sum(num_used) + 3
    ids = iter((rng.permutation(num_pages - 1) + 1).tolist())
    tables = np.zeros((len(spec.rows), max(num_used) + 1), np.int32)
    shape = (num_pages, spec.num_kv_heads, spec.page_size, spec.dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    new_k, new_v = [], []
    for row, (row_spec, used) in enumerate(zip(spec.rows, num_used, strict=True)):
        tables[row, :used] = [next(ids) for _ in range(used)]
        full_pages = [r.context_len >= spec.page_size for r in (spec.rows[0], row_spec)]
        if spec.share_prefix and row > 0 and all(full_pages):
            tables[row, 0] = tables[0, 0]
        for position in range(row_spec.context_len + row_spec.num_new):
            page, slot = tables[row, position // spec.page_size], position % spec.page_size
            if np.isnan(k_pages[page, 0, slot, 0]):
                k_pages[page, :, slot], v_pages[page, :, slot] = rng.standard_normal((2, spec.num_kv_heads, spec.dim), np.float32)
            if position >= row_spec.context_len:
                new_k.append(k_pages[page, :, slot].copy())
                new_v.append(v_pages[page, :, slot].copy())
    news = [row.num_new for row in spec.rows]
    return RaggedBatch(
        queries=rng.standard_normal((sum(news), spec.num_kv_heads * spec.group, spec.dim), np.float32),
        k_pages=k_pages,
        v_pages=v_pages,
        row_starts=np.cumsum([0, *news], dtype=np.int32),
        context_lens=np.array([row.context_len for row in spec.rows], np.int32),
        page_tables=tables,
        new_k=np.stack(new_k),
        new_v=np.stack(new_v),
        scale=spec.dim**-0.5,
    )


_rows = st.builds(RowSpec, context_len=st.integers(0, 50), num_new=st.one_of(st.just(1), st.just(1), st.integers(2, 20)))

batch_specs = st.builds(
    BatchSpec,
    rows=st.lists(_rows, min_size=1, max_size=6).map(tuple),
    num_kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    dim=st.sampled_from((4, 10, 16)),
    page_size=st.sampled_from((1, 4, 12, 16)),
    seed=st.integers(0, 2**16),
    share_prefix=st.booleans(),
)
