"""Every path of an op against its float64 reference, on ragged batches with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings

from pddkernels.kv_pages import portable_torch as torch_pages
from pddkernels.kv_pages import portable_xla as xla_pages
from pddkernels.kv_pages import reference as reference_pages
from pddkernels.ragged_paged_attention import portable_torch, portable_xla, reference
from pddkernels.shapes import MODEL_SHAPES
from pddtorch.arrays import to_numpy, to_torch
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, make_batch

# Page size 4 equals the number of KV heads, and contexts are around page boundaries: where axes or counts could be mixed up.
TREACHEROUS = BatchSpec(
    rows=(RowSpec(0, 1), RowSpec(3, 1), RowSpec(4, 1), RowSpec(5, 1), RowSpec(4, 4), RowSpec(3, 2)),
    num_kv_heads=4,
    group=2,
    dim=4,
    page_size=4,
    share_prefix=True,
)
# More queries than a query block holds, behind a context that ends inside a page.
LONG_CHUNK = BatchSpec(rows=(RowSpec(21, 300), RowSpec(17, 1)), num_kv_heads=1, group=3, dim=16, page_size=16)
# Decode rows that do not fit one group, by size and by padding.
MANY_DECODES = BatchSpec(
    rows=tuple(RowSpec(context_len, 1) for context_len in (410, 3, 390, 250, 12, 400)),
    num_kv_heads=4,
    group=1,
    dim=64,
    page_size=12,
    share_prefix=True,
)
FLOAT32_ERROR = 1e-5
BFLOAT16_RELATIVE_ERROR = 2e-2

Attention = Callable[[RaggedBatch], np.ndarray]


def expected(batch: RaggedBatch) -> np.ndarray:
    return reference.ragged_paged_attention(
        batch.queries, batch.k_pages, batch.v_pages, batch.row_starts, batch.context_lens, batch.page_tables, batch.scale
    )


@torch.inference_mode()
def torch_attention(batch: RaggedBatch) -> np.ndarray:
    queries, k_pages, v_pages = (to_torch(array) for array in (batch.queries, batch.k_pages, batch.v_pages))
    _, num_kv_heads, page_size, dim = k_pages.shape
    plan = portable_torch.plan_attention(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=dim,
        mask_dtype=torch.promote_types(queries.dtype, k_pages.dtype),
        device=torch.device("cpu"),
    )
    return to_numpy(portable_torch.ragged_paged_attention(queries, k_pages, v_pages, plan, batch.scale)).astype(np.float64)


def xla_attention(batch: RaggedBatch) -> np.ndarray:
    out = portable_xla.ragged_paged_attention(
        jnp.asarray(batch.queries),
        jnp.asarray(interleaved(batch.k_pages, batch.v_pages)),
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        batch.scale,
    )
    return np.asarray(out).astype(np.float64)


def interleaved(k_pages: np.ndarray, v_pages: np.ndarray) -> np.ndarray:
    """Head-major [N, heads, page_size, dim] twice -> [N, page_size, heads * 2, dim], k0 v0 k1 v1 ..."""
    both = np.stack((k_pages, v_pages), axis=2).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(both.reshape(*both.shape[:2], -1, both.shape[-1]))


def check(attention: Attention, spec: BatchSpec) -> None:
    batch = make_batch(spec)
    error = np.abs(attention(batch) - expected(batch)).max()
    assert error <= FLOAT32_ERROR
    half = batch.rounded()
    want = expected(half)
    error = np.linalg.norm(attention(half) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= BFLOAT16_RELATIVE_ERROR


@settings(max_examples=60, deadline=None)
@example(TREACHEROUS)
@example(LONG_CHUNK)
@example(MANY_DECODES)
@given(batch_specs)
def test_torch_attention(spec: BatchSpec) -> None:
    check(torch_attention, spec)


# Each shape is a compilation, so fewer are drawn here.
@settings(max_examples=3, deadline=None)
@example(TREACHEROUS)
@example(LONG_CHUNK)
@example(MANY_DECODES)
@given(batch_specs)
def test_xla_attention(spec: BatchSpec) -> None:
    check(xla_attention, spec)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_torch_attention_with_the_heads_of_real_models(name: str) -> None:
    shape = MODEL_SHAPES[name]
    rows = (RowSpec(33, 1), RowSpec(16, 1), RowSpec(5, 9))
    spec = BatchSpec(rows, shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim, page_size=16)
    check(torch_attention, spec)


def test_torch_attention_reads_no_unused_table_entry() -> None:
    """Rows of unequal length in one group: entries past a row's own pages could index anything."""
    batch = make_batch(BatchSpec((RowSpec(15, 1), RowSpec(11, 1), RowSpec(2, 5)), num_kv_heads=3, group=2, dim=4, page_size=4))
    used = np.arange(batch.page_tables.shape[1]) * 4 < (batch.context_lens + np.diff(batch.row_starts))[:, None]
    wild = replace(batch, page_tables=np.where(used, batch.page_tables, 2**30).astype(np.int32))
    assert np.array_equal(torch_attention(wild), torch_attention(batch))


def test_decode_rows_are_cut_into_groups() -> None:
    """MANY_DECODES is only worth its name while it needs several groups, and one of them is padded."""
    batch = make_batch(MANY_DECODES)
    plan = portable_torch.plan_attention(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        num_kv_heads=4,
        page_size=12,
        head_dim=64,
        mask_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert len(plan.groups) >= 3
    assert any(group.dead is not None for group in plan.groups)


def test_reference_is_causal_attention() -> None:
    """The reference itself, against PyTorch's contiguous attention: one row, pages in order."""
    batch = make_batch(BatchSpec((RowSpec(7, 11),), num_kv_heads=2, group=3, dim=8, page_size=6))
    k, v = (reference_pages.read_tokens(pages, batch.page_tables[0], 0, 18) for pages in (batch.k_pages, batch.v_pages))
    q, k, v = (torch.from_numpy(array.astype(np.float64)).transpose(0, 1) for array in (batch.queries, k, v))
    mask = torch.ones(11, 18, dtype=torch.bool).tril(7)
    want = F.scaled_dot_product_attention(q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), attn_mask=mask).transpose(0, 1)
    assert np.abs(expected(batch) - want.numpy()).max() < 1e-12


def emptied(batch: RaggedBatch, dtype: np.dtype[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """The pages before the new tokens were stored, other bits everywhere else kept."""
    pages = []
    for source in (batch.k_pages, batch.v_pages):
        empty = source.astype(dtype)
        marks = np.full_like(batch.new_k, 7)
        reference_pages.write_tokens(empty, marks, batch.row_starts, batch.context_lens, batch.page_tables)
        pages.append(empty)
    return pages[0], pages[1]


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@settings(max_examples=25, deadline=None)
@example(spec=TREACHEROUS)
@given(spec=batch_specs)
def test_torch_pages(dtype: type[np.generic], spec: BatchSpec) -> None:
    """Writing touches the new tokens' slots alone, rounds to nearest even, and reading gives the bits back."""
    batch = make_batch(spec)
    got, want = emptied(batch, np.dtype(dtype))[0], emptied(batch, np.dtype(dtype))[0]
    reference_pages.write_tokens(want, batch.new_k, batch.row_starts, batch.context_lens, batch.page_tables)
    _, rows = torch_pages.new_token_rows(batch.row_starts, batch.context_lens, batch.page_tables, spec.num_kv_heads, spec.page_size)
    torch_pages.write_rows(to_torch(got), torch.from_numpy(rows), torch.from_numpy(batch.new_k))
    assert np.array_equal(bits(got), bits(want))
    read = to_numpy(torch_pages.read_rows(to_torch(got), torch.from_numpy(rows))).reshape(batch.new_k.shape)
    assert np.array_equal(bits(read), bits(batch.new_k.astype(dtype)))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=3, deadline=None)
@example(spec=TREACHEROUS)
@given(spec=batch_specs)
def test_xla_pages(dtype: type[np.generic], spec: BatchSpec) -> None:
    batch = make_batch(spec)
    k_pages, v_pages = emptied(batch, np.dtype(dtype))
    stored = jnp.asarray(interleaved(k_pages, v_pages))
    positions, _ = torch_pages.new_token_rows(batch.row_starts, batch.context_lens, batch.page_tables, spec.num_kv_heads, spec.page_size)
    row_of_token = np.repeat(np.arange(len(spec.rows)), np.diff(batch.row_starts))
    slots = batch.page_tables[row_of_token, positions // spec.page_size] * spec.page_size + positions % spec.page_size
    kv_dtype = stored.dtype
    encoded = jax.lax.bitcast_convert_type(stored, jnp.uint16) if kv_dtype.itemsize == 2 else stored
    out = xla_pages.append(encoded, jnp.asarray(batch.new_k), jnp.asarray(batch.new_v), jnp.asarray(slots, jnp.int32), kv_dtype)
    for pages, values in ((k_pages, batch.new_k), (v_pages, batch.new_v)):
        reference_pages.write_tokens(pages, values, batch.row_starts, batch.context_lens, batch.page_tables)
    assert np.array_equal(bits(np.asarray(out)), bits(interleaved(k_pages, v_pages)))
