"""The CPU's native kernels against the references and against the PyTorch operations that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings

from pddbridge.weight_rounding import round_per_output
from pddkernels.kv_pages import portable_torch as portable_pages
from pddkernels.kv_pages import reference as reference_pages
from pddkernels.native.torch_native import Native
from pddkernels.torch_ops import NATIVE, PORTABLE, UNKNOWN_DTYPE, UNKNOWN_SHAPE, Problem, choose
from pddtorch.arrays import to_numpy, to_torch
from pddtorch.linear import make_int8_linear, make_linear
from tests.conformance.kernel_suite import FIXED_BATCHES, REAL_BATCHES, check_attention, check_float32
from tests.conformance.page_suite import bits, emptied
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, make_batch

CPU = torch.device("cpu")
# Around the spans in which long rows are cut.
SPAN_ROWS = (RowSpec(254, 1), RowSpec(255, 1), RowSpec(256, 1), RowSpec(700, 1), RowSpec(0, 1), RowSpec(511, 1), RowSpec(300, 5))
SPAN_BATCHES = {
    "spans": BatchSpec(SPAN_ROWS, num_kv_heads=2, group=3, dim=64, page_size=12),
    "spans and a window": BatchSpec(SPAN_ROWS, num_kv_heads=1, group=5, dim=64, page_size=16, window=257, sinks=True),
    "chunks over spans": BatchSpec((RowSpec(200, 90), RowSpec(600, 30), RowSpec(0, 300)), num_kv_heads=3, group=3, dim=64, page_size=12),
    "chunks and a window": BatchSpec((RowSpec(700, 90), RowSpec(0, 330)), 2, 5, 80, page_size=16, window=100, sinks=True),
    "chunks, window and cap": BatchSpec((RowSpec(301, 90), RowSpec(40, 330)), 1, 30, 96, page_size=16, window=290, soft_cap=2.0),
    "spans and a cap": BatchSpec(SPAN_ROWS, num_kv_heads=1, group=2, dim=128, page_size=16, window=300, soft_cap=3.0),
}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def native() -> Native:
    return Native(None)


def attention(native: Native) -> Callable[[RaggedBatch], np.ndarray]:
    @torch.inference_mode()
    def attend(batch: RaggedBatch) -> np.ndarray:
        queries, k_pages, v_pages = (to_torch(array) for array in (batch.queries, batch.k_pages, batch.v_pages))
        _, num_kv_heads, page_size, dim = batch.k_pages.shape
        problem = Problem(queries.shape[1], num_kv_heads, dim, page_size, queries.dtype, k_pages.dtype, (batch.options.window,))
        ops = choose(problem, CPU, native)
        assert (ops.path, dict(ops.fallbacks)) == (NATIVE, {})
        sinks = None if batch.sinks is None else torch.from_numpy(batch.sinks)
        step = ops.plan(batch.row_starts, batch.context_lens, batch.page_tables)
        return to_numpy(step.attend(queries, k_pages, v_pages, batch.options, sinks).float()).astype(np.float64)

    return attend


@pytest.mark.parametrize("name", [*FIXED_BATCHES, *SPAN_BATCHES])
def test_fixed_batches(native: Native, name: str) -> None:
    check_attention(attention(native), (FIXED_BATCHES | SPAN_BATCHES)[name])


@pytest.mark.parametrize("name", REAL_BATCHES)
def test_heads_of_real_models(native: Native, name: str) -> None:
    check_attention(attention(native), REAL_BATCHES[name])


@settings(max_examples=40, deadline=None)
@given(spec=batch_specs())
def test_drawn_batches(native: Native, spec: BatchSpec) -> None:
    check_attention(attention(native), spec)


@settings(max_examples=20, deadline=None)
@given(spec=batch_specs(dims=(4, 10)))
def test_tiny_heads(native: Native, spec: BatchSpec) -> None:
    check_float32(attention(native), spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=400, deadline=None)
@given(spec=batch_specs())
def test_many_drawn_batches(native: Native, spec: BatchSpec) -> None:
    check_attention(attention(native), spec)


def test_a_row_is_the_same_to_the_bit_beside_any_others(native: Native) -> None:
    """Spans are cut by position, not by how many rows or threads there are."""
    batch = make_batch(SPAN_BATCHES["spans"])
    whole = attention(native)(batch)
    for row in range(6):
        token = batch.row_starts[row]
        alone = replace(
            batch,
            queries=batch.queries[token : token + 1],
            row_starts=np.array([0, 1], np.int32),
            context_lens=batch.context_lens[row : row + 1],
            page_tables=batch.page_tables[row : row + 1],
        )
        assert np.array_equal(attention(native)(alone)[0], whole[token])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@settings(max_examples=20, deadline=None)
@example(spec=FIXED_BATCHES["page size is kv heads"])
@given(spec=batch_specs(dims=(4, 10, 64)))
def test_new_tokens_go_to_their_slots_alone(native: Native, dtype: type[np.generic], spec: BatchSpec) -> None:
    """Keys float32, values a part of a wider array in bfloat16, both rounded to nearest even."""
    batch = make_batch(spec)
    pages, want = emptied(batch, np.dtype(dtype)), emptied(batch, np.dtype(dtype))
    new_v = batch.new_k.astype(ml_dtypes.bfloat16)
    reference_pages.write_tokens(want[0], batch.new_k, batch.row_starts, batch.context_lens, batch.page_tables)
    reference_pages.write_tokens(want[1], new_v.astype(np.float32), batch.row_starts, batch.context_lens, batch.page_tables)
    _, rows = portable_pages.new_token_rows(batch.row_starts, batch.context_lens, batch.page_tables, spec.num_kv_heads, spec.page_size)
    values = torch.cat((torch.zeros(len(new_v), 2, spec.dim).bfloat16(), to_torch(new_v)), 1)[:, 2:]
    native.append(to_torch(pages[0]), to_torch(pages[1]), torch.from_numpy(rows), torch.from_numpy(batch.new_k), values)
    assert np.array_equal(bits(pages[0]), bits(want[0]))
    assert np.array_equal(bits(pages[1]), bits(want[1]))


def test_what_the_kernels_cannot_serve_is_a_counted_fallback(native: Native) -> None:
    problem = Problem(32, 8, 128, 16, torch.bfloat16, torch.bfloat16)
    for given_problem, reason in (
        (replace(problem, kv_dtype=torch.float16), UNKNOWN_DTYPE),
        (replace(problem, head_dim=1024), UNKNOWN_SHAPE),
        (replace(problem, num_heads=144, num_kv_heads=1), UNKNOWN_SHAPE),
    ):
        ops = choose(given_problem, CPU, native)
        assert (ops.path, dict(ops.fallbacks)) == (PORTABLE, {reason: 1})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 11, 12, 13, 16, 29, 70])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 40), (71, 130), (5, 2), (48, 96)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(native: Native, rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    """Every number of rows has code of its own; neither outputs nor inputs need fill a block."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    if not native.can_pack(num_inputs):
        assert make_linear(weight, None, native).path != NATIVE, "this processor has no dot products of bfloat16 pairs"
        return
    x = torch.randn(rows, num_inputs, generator=generator).bfloat16()
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    packed = native.pack(weight)
    torch.testing.assert_close(native.linear(x, packed, bias, torch.float32).double(), want, atol=1e-4, rtol=1e-5)
    assert torch.equal(native.linear(x, packed, bias, torch.bfloat16), native.linear(x, packed, bias, torch.float32).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_norms(native: Native, dtype: torch.dtype, rows: int, has_post_norm: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, n = torch.randn(rows, 90, generator=generator) * 30, 90
    added = torch.randn(rows, n, generator=generator).to(dtype)
    weight, post = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    alone = native.add_norm(hidden.clone(), None, None, weight, 1e-5, dtype)
    torch.testing.assert_close(alone, F.rms_norm(hidden, (n,), weight, 1e-5).to(dtype))
    want = hidden + (F.rms_norm(added.float(), (n,), post, 1e-5) if has_post_norm else added)
    got = hidden.clone()
    out = native.add_norm(got, added, post if has_post_norm else None, weight, 1e-5, dtype)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(out, F.rms_norm(want, (n,), weight, 1e-5).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations(native: Native, dtype: torch.dtype, activation: str) -> None:
    """Where exp overflows and underflows, too."""
    gate = torch.cat((torch.linspace(-300, 300, 801), torch.linspace(-6, 6, 1200), torch.tensor([0.0, -0.0]))).to(dtype)
    up = torch.linspace(-2, 2, len(gate)).to(dtype)
    wide = gate.float()
    want = (F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")) * up.float()
    got = native.activate(torch.cat((gate, up))[None], activation)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(got, want.to(dtype), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 8e-3)


def test_nan_stays_nan(native: Native) -> None:
    """A broken model must not look like a working one."""
    nan = torch.full((1, 4), float("nan"))
    assert native.activate(nan, "silu").isnan().all()
    assert native.add_norm(nan.clone(), None, None, torch.ones(4), 1e-5, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotary_embedding(native: Native, dtype: torch.dtype, has_norm: bool) -> None:
    tokens, heads, kv_heads, dim = 5, 3, 2, 12
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    norm = torch.randn(heads + kv_heads, dim, generator=generator) if has_norm else None
    angles = torch.randn(tokens, dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    x = qkv[:, : heads + kv_heads].float()
    if norm is not None:
        x = F.rms_norm(x, (dim,), None, 1e-5) * norm
    low, high = x.chunk(2, -1)
    want = torch.cat((low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]), -1)
    tables = (torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    queries, keys = native.rotate(qkv, *tables, norm, 1e-5, heads, kv_heads)
    torch.testing.assert_close(queries, want[:, :heads].to(dtype))
    torch.testing.assert_close(keys, want[:, heads:])


@pytest.mark.parametrize("rows", [1, 2, 3, 12, 13, 40])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 40), (71, 130)])
def test_products_with_int8_weights(native: Native, rows: int, num_outputs: int, num_inputs: int) -> None:
    """Equal to products with the rounded weights, which are as near as they should be; an output of zeros has no scale to divide by."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) * torch.logspace(-3, 3, num_outputs)[:, None]
    weight[5] = 0
    in_int8 = round_per_output(weight.numpy())
    if not native.has_int8:
        with pytest.raises(ValueError, match="compute_dtype: int8"):
            make_int8_linear(in_int8, None, native)
        return
    x = torch.randn(rows, num_inputs, generator=generator).bfloat16()
    step = weight.abs().amax(1, keepdim=True) / 127
    rounded = torch.where(step > 0, (weight / step).round() * step, 0.0)
    assert ((rounded - weight).abs() <= step * 0.5001).all()
    got = make_int8_linear(in_int8, None, native, wide=True)(x).double()
    error = (got - F.linear(x.double(), rounded.double())).abs()
    assert (error <= 1e-5 * F.linear(x.double().abs(), rounded.double().abs())).all()
