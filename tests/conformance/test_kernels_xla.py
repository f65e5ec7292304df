"""The portable XLA paths against the reference. Each shape is a compilation, so fewer batches are drawn than elsewhere."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from pddkernels.kv_pages import portable_xla as xla_pages
from pddkernels.kv_pages import reference as reference_pages
from pddkernels.ragged_paged_attention import portable_xla
from tests.conformance.kernel_suite import FIXED_BATCHES, REAL_BATCHES, check_attention, check_float32
from tests.conformance.page_suite import RANGES, RangeSpec, TokenPages, bits, emptied, make_token_pages, new_slots, range_slots, range_specs
from tests.support.ragged_batches import BatchSpec, RaggedBatch, batch_specs, interleaved, make_batch

append = jax.jit(xla_pages.append, static_argnames="kv_dtype")
pack_tokens, unpack_tokens = jax.jit(xla_pages.pack_tokens), jax.jit(xla_pages.unpack_tokens)


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


# What differs in kind; the others are more of the same program.
QUICK = ("page size is kv heads", "long chunk", "window, cap and sinks")


@pytest.mark.parametrize("name", QUICK)
def test_fixed_batches(name: str) -> None:
    check_attention(attention, FIXED_BATCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FIXED_BATCHES.keys() - set(QUICK)))
def test_other_fixed_batches(name: str) -> None:
    check_attention(attention, FIXED_BATCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(name: str) -> None:
    check_attention(attention, REAL_BATCHES[name])


@settings(max_examples=2, deadline=None)
@given(batch_specs(dims=(64, 80)))
def test_drawn_batches(spec: BatchSpec) -> None:
    check_float32(attention, spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=60, deadline=None)
@given(batch_specs())
def test_many_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=2, deadline=None)
@example(spec=FIXED_BATCHES["page size is kv heads"])
@given(spec=batch_specs(dims=(4, 10)))
def test_pages(dtype: type[np.generic], spec: BatchSpec) -> None:
    """Writing touches the new tokens' slots alone and rounds to nearest even."""
    batch = make_batch(spec)
    k_pages, v_pages = emptied(batch, np.dtype(dtype))
    kv_dtype = jnp.dtype(dtype)
    encoded = interleaved(k_pages, v_pages).view(xla_pages.storage_dtype(kv_dtype))
    out = append(jnp.asarray(encoded), jnp.asarray(batch.new_k), jnp.asarray(batch.new_v), jnp.asarray(new_slots(batch)), kv_dtype)
    for pages, values in ((k_pages, batch.new_k), (v_pages, batch.new_v)):
        reference_pages.write_tokens(pages, values, batch.row_starts, batch.context_lens, batch.page_tables)
    assert np.array_equal(bits(np.asarray(out)), bits(interleaved(k_pages, v_pages)))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=2, deadline=None)
@example(spec=RANGES[2])
@example(spec=RANGES[3])
@given(spec=range_specs)
def test_packing_and_unpacking(dtype: type[np.generic], spec: RangeSpec) -> None:
    """Wire order as the reference has it, any bits kept; the way back touches the range's slots alone."""
    storage = xla_pages.storage_dtype(jnp.dtype(dtype))
    source, target = (make_token_pages(replace(spec, seed=seed), np.dtype(storage)) for seed in (spec.seed, spec.seed + 1))
    stop = spec.start + spec.num_tokens
    want = [reference_pages.pack_tokens(plane, source.page_table, spec.start, stop) for plane in (source.k_pages, source.v_pages)]

    def layers(pages: TokenPages) -> list[jax.Array]:
        return [jnp.asarray(interleaved(k, v)) for k, v in zip(pages.k_pages, pages.v_pages, strict=True)]

    def slots(pages: TokenPages) -> jax.Array:
        page_ids, places = range_slots(spec, pages.page_table)
        return jnp.asarray(page_ids * spec.page_size + places, jnp.int32)

    packed = pack_tokens(layers(source), slots(source))
    for plane, wanted in zip(packed, want, strict=True):
        assert np.array_equal(bits(np.asarray(plane)), bits(wanted))
    placed = unpack_tokens(layers(target), *packed, slots(target))
    for plane, wanted in zip((target.k_pages, target.v_pages), want, strict=True):
        reference_pages.unpack_tokens(plane, wanted, target.page_table, spec.start)
    for got, k, v in zip(placed, target.k_pages, target.v_pages, strict=True):
        assert np.array_equal(bits(np.asarray(got)), bits(interleaved(k, v)))
