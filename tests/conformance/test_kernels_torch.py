"""The portable PyTorch paths against the reference."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from pddkernels.kv_pages import portable_torch as torch_pages
from pddkernels.kv_pages import reference as reference_pages
from pddkernels.ragged_paged_attention import portable_torch
from pddtorch.arrays import to_numpy, to_torch
from tests.conformance.kernel_suite import FIXED_BATCHES, REAL_BATCHES, check_attention, check_float32
from tests.conformance.page_suite import RANGES, RangeSpec, bits, emptied, make_token_pages, range_slots, range_specs
from tests.support.ragged_batches import BatchSpec, RaggedBatch, batch_specs, make_batch


def plan(batch: RaggedBatch) -> portable_torch.AttentionPlan:
    _, num_kv_heads, page_size, dim = batch.k_pages.shape
    return portable_torch.plan_attention(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=dim,
        mask_dtype=torch.promote_types(to_torch(batch.queries).dtype, to_torch(batch.k_pages).dtype),
        device=torch.device("cpu"),
        windows=(batch.options.window,),
    )


@torch.inference_mode()
def attention(batch: RaggedBatch) -> np.ndarray:
    queries, k_pages, v_pages = (to_torch(array) for array in (batch.queries, batch.k_pages, batch.v_pages))
    sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks)
    out = portable_torch.ragged_paged_attention(queries, k_pages, v_pages, plan(batch), batch.options, sinks)
    return to_numpy(out).astype(np.float64)


@pytest.mark.parametrize("name", FIXED_BATCHES)
def test_fixed_batches(name: str) -> None:
    check_attention(attention, FIXED_BATCHES[name])


@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(name: str) -> None:
    check_attention(attention, REAL_BATCHES[name])


@settings(max_examples=40, deadline=None)
@given(batch_specs())
def test_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


@settings(max_examples=20, deadline=None)
@given(batch_specs(dims=(4, 10)))
def test_tiny_heads(spec: BatchSpec) -> None:
    check_float32(attention, spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=400, deadline=None)
@given(batch_specs())
def test_many_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


def test_decode_rows_are_cut_into_groups() -> None:
    """The batch is only worth its name while it needs several groups, and one of them is padded."""
    step = plan(make_batch(FIXED_BATCHES["many decode rows"])).by_window[None]
    assert len(step.groups) >= 3
    assert any(group.dead is not None for group in step.groups)


def test_pages_before_the_window_are_not_gathered() -> None:
    """400 tokens behind a window of 50 with pages of 16: at most 5 of 26 pages per row and head."""
    batch = make_batch(FIXED_BATCHES["window far behind"])
    step = plan(batch).by_window[50]
    assert all(len(group.page_heads) <= group.num_rows * 2 * 5 for group in step.groups)
    assert all(len(chunk.page_heads) <= 2 * 7 for chunk in step.chunks)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@settings(max_examples=20, deadline=None)
@example(spec=FIXED_BATCHES["page size is kv heads"])
@given(spec=batch_specs(dims=(4, 10)))
def test_pages(dtype: type[np.generic], spec: BatchSpec) -> None:
    """Writing touches the new tokens' slots alone, rounds to nearest even, and reading gives the bits back."""
    batch = make_batch(spec)
    got, want = emptied(batch, np.dtype(dtype))[0], emptied(batch, np.dtype(dtype))[0]
    reference_pages.write_tokens(want, batch.new_k, batch.row_starts, batch.context_lens, batch.page_tables)
    _, rows = torch_pages.new_token_rows(batch.row_starts, batch.context_lens, batch.page_tables, spec.num_kv_heads, spec.page_size)
    torch_pages.write_rows(to_torch(got), torch.from_numpy(rows), torch.from_numpy(batch.new_k))
    assert np.array_equal(bits(got), bits(want))
    read = to_numpy(torch_pages.pack_tokens([to_torch(got)], torch.from_numpy(rows), spec.num_kv_heads))[0]
    assert np.array_equal(bits(read), bits(batch.new_k.astype(dtype)))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=20, deadline=None)
@example(spec=RANGES[0])
@example(spec=RANGES[1])
@example(spec=RANGES[2])
@example(spec=RANGES[3])
@given(spec=range_specs)
def test_packing_and_unpacking(dtype: type[np.generic], spec: RangeSpec) -> None:
    """Wire order as the reference has it, any bits kept; the way back touches the range's slots alone."""
    source, target = (make_token_pages(replace(spec, seed=seed), np.dtype(dtype)) for seed in (spec.seed, spec.seed + 1))
    want = reference_pages.pack_tokens(source.k_pages, source.page_table, spec.start, spec.start + spec.num_tokens)
    heads = np.arange(spec.num_kv_heads)
    rows = [
        torch.from_numpy(torch_pages.slot_rows(*range_slots(spec, pages.page_table), heads, spec.num_kv_heads, spec.page_size))
        for pages in (source, target)
    ]
    packed = torch_pages.pack_tokens([to_torch(pages) for pages in source.k_pages], rows[0], spec.num_kv_heads)
    assert np.array_equal(bits(to_numpy(packed)), bits(want))
    expected = tuple(pages.copy() for pages in target.v_pages)
    reference_pages.unpack_tokens(expected, want, target.page_table, spec.start)
    torch_pages.unpack_tokens([to_torch(pages) for pages in target.v_pages], rows[1], packed)
    assert all(np.array_equal(bits(one), bits(other)) for one, other in zip(target.v_pages, expected, strict=True))
