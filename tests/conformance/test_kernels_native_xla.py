"""The CPU's native kernels as XLA calls them: attention of one new token per row against the reference, products against numpy's."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pddkernels.jax_ops import JaxOps, choose
from pddkernels.kv_pages.portable_xla import encode
from tests.conformance.kernel_suite import FIXED_BATCHES, REAL_BATCHES, check_attention, check_float32
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, make_batch

# Around the spans in which long rows are cut, and a row that has no token.
ROWS = tuple(RowSpec(context_len, 1) for context_len in (254, 255, 256, 700, 0, 511, 17))
BATCHES = {
    "spans": BatchSpec(ROWS, num_kv_heads=3, group=3, dim=64, page_size=12),
    "spans and a window": BatchSpec(ROWS, num_kv_heads=1, group=5, dim=64, page_size=16, window=257, sinks=True),
    "spans and a cap": BatchSpec(ROWS, num_kv_heads=2, group=2, dim=128, page_size=16, window=300, soft_cap=3.0),
    "head size 80": BatchSpec(ROWS, num_kv_heads=2, group=4, dim=80, page_size=16, sinks=True, share_prefix=True),
    "one row": BatchSpec((RowSpec(15, 1),), num_kv_heads=1, group=1, dim=64, page_size=16),
}

CHUNKS = {
    "chunks over blocks": BatchSpec((RowSpec(200, 90), RowSpec(600, 30), RowSpec(0, 300)), num_kv_heads=3, group=3, dim=64, page_size=12),
    "chunks and a window": BatchSpec((RowSpec(700, 90), RowSpec(0, 330), RowSpec(300, 1)), 2, 5, 80, page_size=16, window=100, sinks=True),
    "chunks, window and cap": BatchSpec((RowSpec(301, 90), RowSpec(40, 130)), 1, 30, 96, page_size=16, window=65, soft_cap=2.0),
}


def ops_for(kv_heads: int, dim: int, kv_dtype: str) -> JaxOps:
    shape = {"num_heads": kv_heads, "kv_heads": kv_heads, "head_dim": dim, "max_rows": 8, "pages_per_row": 8}
    ops = choose(jax.devices("cpu")[0], kv_dtype=jnp.dtype(kv_dtype), **shape)
    assert ops.native
    assert ops.fallbacks == ()
    return ops


def ragged(batch: RaggedBatch) -> np.ndarray:
    """In arrays with room for three more tokens and a row."""
    dtype = jnp.dtype(batch.k_pages.dtype)
    ops = ops_for(batch.k_pages.shape[1], batch.k_pages.shape[3], dtype.name)
    num_tokens, num_rows = len(batch.queries), len(batch.context_lens)
    queries = np.pad(batch.queries.astype(np.float32), ((0, 3), (0, 0), (0, 0)), constant_values=np.nan)
    tables = np.pad(batch.page_tables, ((0, 1), (0, 0)))
    pages = encode(jnp.asarray(batch.interleaved_pages), dtype)
    plan = ops.plan(batch.row_starts, batch.context_lens, num_tokens + 3, num_rows + 1)
    sinks = None if batch.sinks is None else jnp.asarray(batch.sinks)
    out = np.asarray(jax.jit(ops.attend, static_argnames="options")(queries, pages, tables, plan, options=batch.options, sinks=sinks))
    assert not out[num_tokens:].any()
    return out[:num_tokens].astype(np.float64)


def attention(batch: RaggedBatch) -> np.ndarray:
    """Rows without a new token stand in the batch as padding does."""
    dtype = jnp.dtype(batch.k_pages.dtype)
    ops = ops_for(batch.k_pages.shape[1], batch.k_pages.shape[3], dtype.name)
    news = np.diff(batch.row_starts).astype(np.int32)
    queries = np.full((len(news), *batch.queries.shape[1:]), np.nan, np.float32)
    queries[news == 1] = batch.queries
    pages = encode(jnp.asarray(batch.interleaved_pages), dtype)
    sinks = None if batch.sinks is None else jnp.asarray(batch.sinks)
    attend = jax.jit(ops.attend_decode, static_argnames="options")
    out = np.asarray(attend(queries, pages, batch.page_tables, batch.context_lens, news, options=batch.options, sinks=sinks))
    assert not out[news == 0].any()
    return out[news == 1].astype(np.float64)


def decode_only(spec: BatchSpec) -> BatchSpec:
    return replace(spec, rows=tuple(RowSpec(row.context_len, min(row.num_new, 1)) for row in spec.rows))


@pytest.mark.parametrize("name", BATCHES)
def test_fixed_batches(name: str) -> None:
    check_attention(attention, BATCHES[name])


@pytest.mark.parametrize("name", [*FIXED_BATCHES, *CHUNKS])
def test_fixed_ragged_batches(name: str) -> None:
    check_attention(ragged, (FIXED_BATCHES | CHUNKS)[name])


@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(name: str) -> None:
    check_attention(ragged, REAL_BATCHES[name])


@settings(max_examples=10, deadline=None)
@given(spec=batch_specs().map(decode_only))
def test_drawn_batches(spec: BatchSpec) -> None:
    check_attention(attention, spec)


@settings(max_examples=10, deadline=None)
@given(spec=batch_specs())
def test_drawn_ragged_batches(spec: BatchSpec) -> None:
    check_attention(ragged, spec)


@settings(max_examples=5, deadline=None)
@given(spec=batch_specs(dims=(4, 10)).map(decode_only))
def test_tiny_heads(spec: BatchSpec) -> None:
    check_float32(attention, spec)


@settings(max_examples=5, deadline=None)
@given(spec=batch_specs(dims=(4, 10)))
def test_tiny_ragged_heads(spec: BatchSpec) -> None:
    check_float32(ragged, spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=300, deadline=None)
@given(spec=batch_specs())
def test_many_drawn_batches(spec: BatchSpec) -> None:
    check_attention(ragged, spec)
    if any(row.num_new == 1 for row in spec.rows):
        check_attention(attention, decode_only(spec))


def test_a_row_is_the_same_to_the_bit_beside_any_others() -> None:
    whole = make_batch(BATCHES["spans"])
    alone = replace(
        whole,
        queries=whole.queries[3:4],
        row_starts=np.array([0, 1], np.int32),
        context_lens=whole.context_lens[3:4],
        page_tables=whole.page_tables[3:4],
    )
    assert np.array_equal(attention(alone)[0], attention(whole)[3])


@pytest.mark.parametrize("columns", [1, 2, 4, 7, 8, 16, 17])
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (12, 16), (25, 33), (960, 576), (13, 1500)])
def test_products(outs: int, ins: int, columns: int) -> None:
    """Whatever is left over of rows, of inputs and of columns."""
    rng = np.random.default_rng(outs)
    weight, x = rng.standard_normal((outs, ins), np.float32), rng.standard_normal((ins, columns), np.float32)
    got = np.asarray(jax.jit(ops_for(1, 64, "float32").product)(weight, x))
    want = weight.astype(np.float64) @ x.astype(np.float64)
    assert np.abs(got - want).max() <= 1e-6 * (np.abs(weight).astype(np.float64) @ np.abs(x)).max()


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (12, 32), (25, 33), (960, 576), (13, 1500)])
def test_products_with_int8_weights(outs: int, ins: int, columns: int) -> None:
    """Whatever is left over of rows, of inputs and of columns; a column's are the same to the bit beside any others."""
    rng = np.random.default_rng(outs)
    weight = rng.integers(-127, 128, (outs, ins), np.int8)
    x = jnp.asarray(rng.standard_normal((ins, columns)), jnp.bfloat16)
    product = jax.jit(ops_for(1, 64, "bfloat16").product)
    assert "pdd_product_int8" in product.lower(weight, x).as_text()
    got, exact = np.asarray(product(weight, x)), np.asarray(x.astype(jnp.float32)).astype(np.float64)
    assert got.dtype == np.float32
    assert got.shape == (outs, columns)
    assert np.abs(got - weight @ exact).max() <= 1e-6 * (np.abs(weight.astype(np.float64)) @ np.abs(exact)).max()
    alone = np.asarray(product(weight, x[:, -1:]))
    assert np.array_equal(alone, got[:, -1:])


def test_what_native_kernels_do_not_take_goes_the_portable_way() -> None:
    ops = ops_for(1, 64, "bfloat16")
    text = jax.jit(ops.product).lower(jnp.zeros((4, 8)), jnp.zeros((8, 17))).as_text()
    assert "pdd_product" not in text
    halves = jax.jit(ops.product).lower(jnp.zeros((4, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.bfloat16)).as_text()
    assert "pdd_product" not in halves
    wide = jax.jit(ops.product).lower(jnp.zeros((4, 8), jnp.int8), jnp.zeros((8, 4))).as_text()
    assert "pdd_product" not in wide
    assert "pdd_product" in jax.jit(ops.product).lower(jnp.zeros((4, 8)), jnp.zeros((8, 16))).as_text()
    unserved = choose(
        jax.devices("cpu")[0], num_heads=1, kv_heads=1, head_dim=8, kv_dtype=jnp.dtype("float16"), max_rows=1, pages_per_row=1
    )
    assert unserved.fallbacks == ("portable_attention_kv_dtype",)
