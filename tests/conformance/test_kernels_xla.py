"""The portable XLA paths against the reference. Each shape is a compilation, so fewer batches are drawn than elsewhere."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from pddkernels.kv_pages import portable_xla as xla_pages
from pddkernels.kv_pages import reference as reference_pages
from pddkernels.ragged_paged_attention import portable_xla
from tests.conformance.kernel_suite import FIXED_BATCHES, REAL_BATCHES, check_attention
from tests.conformance.page_suite import bits, emptied, new_slots
from tests.support.ragged_batches import BatchSpec, RaggedBatch, batch_specs, interleaved, make_batch


def attention(batch: RaggedBatch) -> np.ndarray:
    out = portable_xla.ragged_paged_attention(
        jnp.asarray(batch.queries),
        jnp.asarray(batch.interleaved_pages),
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        batch.options,
        None if batch.sinks is None else jnp.asarray(batch.sinks),
    )
    return np.asarray(out).astype(np.float64)


@pytest.mark.parametrize("name", FIXED_BATCHES)
def test_fixed_batches(name: str) -> None:
    check_attention(attention, FIXED_BATCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(name: str) -> None:
    check_attention(attention, REAL_BATCHES[name])


@settings(max_examples=3, deadline=None)
@given(batch_specs(dims=(64, 80)))
def test_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(batch_specs())
def test_many_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=3, deadline=None)
@example(spec=FIXED_BATCHES["page size is kv heads"])
@given(spec=batch_specs(dims=(4, 10)))
def test_pages(dtype: type[np.generic], spec: BatchSpec) -> None:
    """Writing touches the new tokens' slots alone and rounds to nearest even."""
    batch = make_batch(spec)
    k_pages, v_pages = emptied(batch, np.dtype(dtype))
    kv_dtype = jnp.dtype(dtype)
    encoded = interleaved(k_pages, v_pages).view(xla_pages.storage_dtype(kv_dtype))
    out = xla_pages.append(
        jnp.asarray(encoded), jnp.asarray(batch.new_k), jnp.asarray(batch.new_v), jnp.asarray(new_slots(batch)), kv_dtype
    )
    for pages, values in ((k_pages, batch.new_k), (v_pages, batch.new_v)):
        reference_pages.write_tokens(pages, values, batch.row_starts, batch.context_lens, batch.page_tables)
    assert np.array_equal(bits(np.asarray(out)), bits(interleaved(k_pages, v_pages)))
