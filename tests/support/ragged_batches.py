"""Ragged batches over paged KV for kernel tests: unequal rows, pages in random order, NaN in every slot that no row may read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from pddkernels.ragged_paged_attention.options import AttentionOptions

# Stands in table entries past a row's own pages: whoever reads one leaves the pool.
POISON_PAGE: Final = 2**30


@dataclass(frozen=True)
class RowSpec:
    """``context_len`` tokens in KV already, then ``num_new``, which may be 0."""

    context_len: int
    num_new: int


@dataclass(frozen=True)
class BatchSpec:
    """What a batch looks like; at least one row has a new token.

    ``share_prefix``: rows whose context fills whole pages share row 0's first page, as a prefix cache does. ``sinks``: draw one per head.
    """

    rows: tuple[RowSpec, ...]
    num_kv_heads: int
    group: int
    dim: int
    page_size: int
    seed: int = 0
    share_prefix: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


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
    options: AttentionOptions
    sinks: np.ndarray | None

    def rounded(self) -> RaggedBatch:
        """The same with queries and pages in bfloat16."""
        as_bfloat16 = {name: getattr(self, name).astype(ml_dtypes.bfloat16) for name in ("queries", "k_pages", "v_pages")}
        return replace(self, **as_bfloat16)

    @property
    def interleaved_pages(self) -> np.ndarray:
        """[N, page_size, 2 * kv_heads, dim], k0 v0 k1 v1 ..., in the dtype of the pages."""
        return interleaved(self.k_pages, self.v_pages)


def interleaved(k_pages: np.ndarray, v_pages: np.ndarray) -> np.ndarray:
    """Head-major [N, heads, page_size, dim] twice -> [N, page_size, 2 * heads, dim], k0 v0 k1 v1 ..."""
    both = np.stack((k_pages, v_pages), axis=2).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(both.reshape(*both.shape[:2], -1, both.shape[-1]))


def make_batch(spec: BatchSpec) -> RaggedBatch:
    """Every slot no row may read is NaN: past a row's last token, before the window of its first new one, in pages of nobody (page 0 among
    them, a usual padding), and in the context of a row without new tokens.
    """
    rng = np.random.default_rng(spec.seed)
    num_used = [-(-(row.context_len + row.num_new) // spec.page_size) for row in spec.rows]
    num_pages = 1 + sum(num_used) + 3
    ids = iter((rng.permutation(num_pages - 1) + 1).tolist())
    tables = np.full((len(spec.rows), max(num_used) + 1), POISON_PAGE, np.int32)
    shape = (num_pages, spec.num_kv_heads, spec.page_size, spec.dim)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    new_k, new_v = [], []
    for row, (row_spec, used) in enumerate(zip(spec.rows, num_used, strict=True)):
        tables[row, :used] = [next(ids) for _ in range(used)]
        full_pages = [r.context_len >= spec.page_size for r in (spec.rows[0], row_spec)]
        if spec.share_prefix and row > 0 and all(full_pages):
            tables[row, 0] = tables[0, 0]
        lowest = 0 if spec.window is None else max(0, row_spec.context_len - spec.window + 1)
        for position in range(lowest, row_spec.context_len + row_spec.num_new if row_spec.num_new else 0):
            page, slot = tables[row, position // spec.page_size], position % spec.page_size
            if np.isnan(k_pages[page, 0, slot, 0]):
                k_pages[page, :, slot], v_pages[page, :, slot] = rng.standard_normal((2, spec.num_kv_heads, spec.dim), np.float32)
            if position >= row_spec.context_len:
                new_k.append(k_pages[page, :, slot].copy())
                new_v.append(v_pages[page, :, slot].copy())
    news = [row.num_new for row in spec.rows]
    num_heads = spec.num_kv_heads * spec.group
    return RaggedBatch(
        queries=rng.standard_normal((sum(news), num_heads, spec.dim), np.float32),
        k_pages=k_pages,
        v_pages=v_pages,
        row_starts=np.cumsum([0, *news], dtype=np.int32),
        context_lens=np.array([row.context_len for row in spec.rows], np.int32),
        page_tables=tables,
        new_k=np.stack(new_k),
        new_v=np.stack(new_v),
        options=AttentionOptions(spec.dim**-0.5, spec.window, spec.soft_cap),
        sinks=2 * rng.standard_normal(num_heads, np.float32) if spec.sinks else None,
    )


_rows = st.builds(RowSpec, context_len=st.integers(0, 50), num_new=st.sampled_from((1, 1, 1, 0, 2, 3, 5, 9, 16, 17, 20)))


def batch_specs(
    dims: tuple[int, ...] = (64, 80, 96, 128, 256), page_sizes: tuple[int, ...] = (1, 3, 4, 12, 16)
) -> st.SearchStrategy[BatchSpec]:
    """Small batches of mixed rows. Soft caps are of the scores' own size, so that leaving one out shows."""
    return st.builds(
        BatchSpec,
        rows=st.lists(_rows, min_size=1, max_size=6).filter(lambda rows: any(row.num_new for row in rows)).map(tuple),
        num_kv_heads=st.integers(1, 4),
        group=st.integers(1, 9),
        dim=st.sampled_from(dims),
        page_size=st.sampled_from(page_sizes),
        seed=st.integers(0, 2**16),
        share_prefix=st.booleans(),
        window=st.one_of(st.none(), st.integers(1, 40)),
        soft_cap=st.sampled_from((None, None, 0.7, 2.0, 30.0)),
        sinks=st.booleans(),
    )
