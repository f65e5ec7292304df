"""The Pallas path of multi-head latent attention, interpreted on the CPU."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pddkernels.mla_decode.pallas import mla_attention
from tests.conformance.mla_suite import MLA_BATCHES, MLABatch, MLASpec, check_mla, mla_specs


def attention(batch: MLABatch) -> np.ndarray:
    planes = (batch.q_latent, batch.q_rope, batch.latent_pages, batch.rope_pages)
    rows = (batch.row_starts, batch.context_lens, batch.page_tables, np.array([len(batch.context_lens)], np.int32))
    run = jax.jit(partial(mla_attention, scale=batch.scale, interpret=True))
    return np.asarray(run(*(jnp.asarray(array) for array in planes + rows)), np.float64)


def test_a_fixed_batch() -> None:
    check_mla(attention, next(iter(MLA_BATCHES.values())))


@pytest.mark.slow
@pytest.mark.parametrize("name", MLA_BATCHES)
def test_fixed_batches(name: str) -> None:
    check_mla(attention, MLA_BATCHES[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=25, deadline=None)
@given(mla_specs)
def test_many_drawn_batches(spec: MLASpec) -> None:
    check_mla(attention, spec)
