"""The float64 reference itself, against PyTorch's contiguous attention with the mask, cap and sinks written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pddkernels.kv_pages.reference import read_tokens
from tests.conformance.kernel_suite import expected
from tests.support.ragged_batches import BatchSpec, RowSpec, make_batch


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 5, 18])
def test_reference_is_causal_attention(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    """One row: 11 tokens behind 7, pages in random order."""
    batch = make_batch(
        BatchSpec((RowSpec(7, 11),), num_kv_heads=2, group=3, dim=8, page_size=6, window=window, soft_cap=soft_cap, sinks=sinks)
    )
    k, v = (np.nan_to_num(read_tokens(pages, batch.page_tables[0], 0, 18)) for pages in (batch.k_pages, batch.v_pages))
    q, k, v = (torch.from_numpy(array.astype(np.float64)).transpose(0, 1) for array in (batch.queries, k, v))
    scores = q @ k.repeat_interleave(3, 0).transpose(1, 2) / 8**0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(7, 18)[:, None] - torch.arange(18)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or 18)), float("-inf"))
    total = scores.exp().sum(-1, keepdim=True)
    if batch.sinks is not None:
        total = total + torch.from_numpy(batch.sinks).double().exp()[:, None, None]
    want = (scores.exp() / total @ v.repeat_interleave(3, 0)).transpose(0, 1)
    assert np.abs(expected(batch) - want.numpy()).max() < 1e-12
