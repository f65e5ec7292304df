"""Multi-head latent attention: the reference against the other op's, the portable paths against the reference."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pddkernels.mla_decode import portable_torch, portable_xla
from pddkernels.ragged_paged_attention import reference as ragged_reference
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.portable_torch import plan_attention
from pddtorch.arrays import to_numpy, to_torch
from tests.conformance.mla_suite import MLA_BATCHES, MLABatch, MLASpec, check_mla, expected, mla_specs, ragged_batch, split


@torch.inference_mode()
def torch_mla(batch: MLABatch) -> np.ndarray:
    arrays = tuple(to_torch(array) for array in (batch.q_latent, batch.q_rope, batch.latent_pages, batch.rope_pages))
    plan = plan_attention(
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        num_kv_heads=1,
        page_size=batch.latent_pages.shape[1],
        head_dim=batch.latent_pages.shape[2] + batch.rope_pages.shape[2],
        mask_dtype=torch.promote_types(arrays[0].dtype, arrays[2].dtype),
        device=torch.device("cpu"),
    )
    return to_numpy(portable_torch.mla_attention(*arrays, plan, batch.scale)).astype(np.float64)


def xla_mla(batch: MLABatch) -> np.ndarray:
    arrays = (jnp.asarray(array) for array in (batch.q_latent, batch.q_rope, batch.latent_pages, batch.rope_pages))
    return np.asarray(portable_xla.mla_attention(*arrays, batch.row_starts, batch.context_lens, batch.page_tables, batch.scale), np.float64)


def xla_decode_mla(batch: MLABatch) -> np.ndarray:
    """Rows of one new token, as the engines' decode program has them."""
    arrays = (jnp.asarray(array) for array in (batch.q_latent, batch.q_rope))
    kv_dtype = jnp.dtype(batch.latent_pages.dtype)
    pages = (portable_xla.encode(jnp.asarray(plane), kv_dtype) for plane in (batch.latent_pages, batch.rope_pages))
    rows = jnp.asarray(batch.page_tables), jnp.asarray(batch.context_lens), jnp.asarray(np.diff(batch.row_starts))
    return np.asarray(portable_xla.decode_mla_attention(*arrays, *pages, *rows, batch.scale, kv_dtype), np.float64)


@pytest.mark.parametrize("name", MLA_BATCHES)
def test_reference_is_attention_with_one_kv_head(name: str) -> None:
    """Keys: latent and rope side by side; values: the latent, then zeros that are cut off."""
    spec = MLA_BATCHES[name]
    exact = ragged_batch(spec)
    values = exact.k_pages.copy()
    values[..., spec.latent_dim :] = 0
    want = ragged_reference.ragged_paged_attention(
        exact.queries,
        exact.k_pages,
        values,
        exact.row_starts,
        exact.context_lens,
        exact.page_tables,
        AttentionOptions(spec.scale),
    )
    assert np.abs(expected(split(spec, exact)) - want[..., : spec.latent_dim]).max() < 1e-12


@pytest.mark.parametrize("name", MLA_BATCHES)
def test_torch(name: str) -> None:
    check_mla(torch_mla, MLA_BATCHES[name])


@pytest.mark.parametrize("name", ["page size is heads", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek-v3", "long"))])
def test_xla(name: str) -> None:
    check_mla(xla_mla, MLA_BATCHES[name])


def test_xla_decode() -> None:
    spec = MLA_BATCHES["deepseek-v3"]
    check_mla(xla_decode_mla, replace(spec, rows=tuple(row for row in spec.rows if row.num_new == 1)))


@settings(max_examples=15, deadline=None)
@given(mla_specs)
def test_torch_on_drawn_batches(spec: MLASpec) -> None:
    check_mla(torch_mla, spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=30, deadline=None)
@given(mla_specs)
def test_xla_on_drawn_batches(spec: MLASpec) -> None:
    check_mla(xla_mla, spec)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=200, deadline=None)
@given(mla_specs)
def test_torch_on_many_drawn_batches(spec: MLASpec) -> None:
    check_mla(torch_mla, spec)
