"""The Pallas paths of attention and KV pages, interpreted on the CPU: what they compute. :mod:`pddkernels.targets` shows that they
compile for TPUs.

Each shape is a slow compilation, so few run in every test run. Block sizes are small: every batch crosses query blocks, page buffers and
softmax updates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings

from pddkernels.kv_pages import reference as reference_pages
from pddkernels.kv_pages.pallas import gather, put
from pddkernels.ragged_paged_attention.block_sizes import GENERATIONS, BlockSizes, block_sizes
from pddkernels.ragged_paged_attention.pallas import padded_dim, padded_heads, ragged_paged_attention
from tests.conformance.kernel_suite import (
    FIXED_BATCHES,
    FLOAT32_ERROR,
    REAL_BATCHES,
    check_attention,
    check_bfloat16,
    check_float32,
    expected,
)
from tests.conformance.page_suite import emptied, new_slots
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, interleaved, make_batch

BLOCKS = BlockSizes(query_tokens=16, kv_tokens=160, compute_tokens=128, vmem_limit_bytes=2**26)


def attention(batch: RaggedBatch, blocks: BlockSizes = BLOCKS, spare_rows: int = 2) -> np.ndarray:
    """The batch comes with rows past ``num_rows``, which say nonsense."""
    num_rows = len(batch.context_lens)
    row_starts, context_lens = (np.pad(a, (0, spare_rows), constant_values=7) for a in (batch.row_starts, batch.context_lens))
    out = jax.jit(partial(ragged_paged_attention, options=batch.options, blocks=blocks, interpret=True))(
        jnp.asarray(batch.queries),
        jnp.asarray(batch.interleaved_pages),
        jnp.asarray(row_starts),
        jnp.asarray(context_lens),
        jnp.asarray(np.pad(batch.page_tables, ((0, spare_rows), (0, 0)), constant_values=2**30)),
        jnp.array([num_rows], jnp.int32),
        sinks=None if batch.sinks is None else jnp.asarray(batch.sinks),
    )
    return np.asarray(out).astype(np.float64)


# One float32 and one bfloat16 batch run always: window, cap and sinks over three heads and pages of three; rows that
# end around page boundaries.
ALWAYS_FLOAT32 = "window, cap and sinks"
ALWAYS_BFLOAT16 = "page size is kv heads"


def test_window_cap_and_sinks() -> None:
    check_float32(attention, FIXED_BATCHES[ALWAYS_FLOAT32])


def test_boundaries_in_bfloat16() -> None:
    check_bfloat16(attention, FIXED_BATCHES[ALWAYS_BFLOAT16])


@settings(max_examples=1, deadline=None)
@given(batch_specs(dims=(64,)))
def test_a_drawn_batch(spec: BatchSpec) -> None:
    check_bfloat16(attention, spec)


def test_tokens_of_no_row_give_zeros_and_two_cores_share_the_blocks() -> None:
    """Two cores on a machine of one: they take turns, and each keeps to its own blocks."""
    batch = make_batch(BatchSpec((RowSpec(30, 21), RowSpec(160, 1), RowSpec(0, 14)), num_kv_heads=3, group=1, dim=64, page_size=16))
    padded = replace(batch, queries=np.pad(batch.queries, ((0, 30), (0, 0), (0, 0)), constant_values=1.0))
    out = attention(padded, replace(BLOCKS, num_cores=2))
    assert not out[36:].any()
    assert np.abs(out[:36] - expected(batch)).max() <= FLOAT32_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED_BATCHES)
def test_fixed_batches(name: str) -> None:
    check_attention(attention, FIXED_BATCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(name: str) -> None:
    spec = REAL_BATCHES[name]
    blocks = block_sizes(
        "v5e", num_heads=spec.num_kv_heads * spec.group, token_bytes=4 * padded_heads(spec.num_kv_heads) * padded_dim(spec.dim)
    )
    check_attention(partial(attention, blocks=blocks), spec)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=25, deadline=None)
@given(batch_specs())
def test_many_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


def check_pages(spec: BatchSpec) -> None:
    """Writing touches the new tokens' slots alone and padding nothing; reading gives the bits back, and zeros for padding."""
    batch = make_batch(spec)
    dtype = np.dtype(np.uint16)
    k_pages, v_pages = (pages.view(dtype) for pages in emptied(batch, np.dtype(ml_dtypes.bfloat16)))
    new_k, new_v = (values.astype(ml_dtypes.bfloat16).view(dtype) for values in (batch.new_k, batch.new_v))
    stored = np.stack((new_k, new_v), axis=2).reshape(len(new_k), -1, spec.dim)
    past = len(k_pages) * spec.page_size + np.arange(3, dtype=np.int32)
    slots = jnp.asarray(np.concatenate((new_slots(batch), past)))
    before = jnp.asarray(interleaved(k_pages, v_pages))
    after = jax.jit(partial(put, interpret=True))(before, jnp.asarray(np.pad(stored, ((0, 3), (0, 0), (0, 0)), constant_values=9)), slots)
    for pages, values in ((k_pages, new_k), (v_pages, new_v)):
        reference_pages.write_tokens(pages, values, batch.row_starts, batch.context_lens, batch.page_tables)
    assert np.array_equal(np.asarray(after), interleaved(k_pages, v_pages))
    read = np.asarray(jax.jit(partial(gather, interpret=True))(after, slots))
    assert np.array_equal(read[:-3], stored)
    assert not read[-3:].any()


@settings(max_examples=1, deadline=None)
@example(BatchSpec((RowSpec(3, 30), RowSpec(8, 1), RowSpec(0, 17)), num_kv_heads=2, group=1, dim=4, page_size=4))
@example(BatchSpec((RowSpec(0, 40), RowSpec(2, 7)), num_kv_heads=1, group=1, dim=4, page_size=1))  # more copies than are in flight
@given(batch_specs(dims=(4, 10)))
def test_pages(spec: BatchSpec) -> None:
    check_pages(spec)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(batch_specs(dims=(4, 10)))
def test_pages_often(spec: BatchSpec) -> None:
    check_pages(spec)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("dtype", {"dtype": jnp.float16}),
        ("padded", {"planes": 12}),
        ("padded", {"dim": 64}),
        ("kv_heads", {"planes": 5}),
        ("sinks", {"sinks": 3}),
    ],
)
def test_what_it_cannot_do_is_refused(what: str, change: dict[str, int]) -> None:
    given_ = {"dtype": jnp.bfloat16, "planes": 8, "dim": 128, "sinks": 12} | change
    shapes = [
        jax.ShapeDtypeStruct((8, 12, 64), given_["dtype"]),
        jax.ShapeDtypeStruct((5, 16, given_["planes"], given_["dim"]), jnp.bfloat16),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (2,), (2, 4), (1,))),
    ]
    sinks = jax.ShapeDtypeStruct((given_["sinks"],), jnp.float32)
    options = make_batch(FIXED_BATCHES["one token"]).options
    with pytest.raises(ValueError, match=what if what != "dtype" else "queries: given float16"):
        jax.eval_shape(lambda *a: ragged_paged_attention(*a[:6], options, a[6], blocks=BLOCKS), *shapes, sinks)


def test_block_sizes_grow_with_bandwidth_and_fit() -> None:
    """A buffer holds what the table says whatever a token weighs, within its limits; more heads, fewer queries a block."""
    for generation in GENERATIONS:
        small, large = (block_sizes(generation, num_heads=heads, token_bytes=4096) for heads in (8, 128))
        assert small.query_tokens > large.query_tokens
        assert 2 * small.kv_tokens * 4096 < small.vmem_limit_bytes
    assert block_sizes("v6e", num_heads=8, token_bytes=4096).kv_tokens == 2 * block_sizes("v5e", num_heads=8, token_bytes=4096).kv_tokens
    with pytest.raises(ValueError, match="generation"):
        block_sizes("v4", num_heads=8, token_bytes=512)
