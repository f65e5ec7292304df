"""The float64 reference itself, against contiguous attention with the mask, cap and sinks written out; and the suite, against faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from pddkernels.kv_pages.reference import read_tokens
from tests.conformance.kernel_suite import FIXED_BATCHES, check_bfloat16, check_float32, expected
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, make_batch


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


def reorder(array: np.ndarray | None, num_kv_heads: int) -> np.ndarray | None:
    """Heads [kv_heads, group] read as [group, kv_heads]."""
    return None if array is None else array.reshape(-1, num_kv_heads).T.reshape(array.shape)


def off_by_one(batch: RaggedBatch) -> RaggedBatch:
    """Every query sees one key less."""
    return replace(batch, context_lens=np.maximum(batch.context_lens - 1, 0))


def with_options(**changes: float | None) -> Callable[[RaggedBatch], RaggedBatch]:
    return lambda batch: replace(batch, options=replace(batch.options, **changes))  # type: ignore[arg-type]


FAULTS: dict[str, tuple[str, Callable[[RaggedBatch], RaggedBatch]]] = {
    "no window": ("window", with_options(window=None)),
    "window one longer": ("window", with_options(window=10)),
    "window one shorter": ("window", with_options(window=8)),
    "no cap": ("soft cap", with_options(soft_cap=None)),
    "no sinks": ("sinks", lambda batch: replace(batch, sinks=None)),
    "sinks of other heads": ("sinks", lambda batch: replace(batch, sinks=reorder(batch.sinks, 2))),
    "one key less": ("page size is kv heads", off_by_one),
    "scale": ("page size is kv heads", with_options(scale=0.16)),
    "values for keys": ("mixed rows, head size 80", lambda batch: replace(batch, k_pages=batch.v_pages)),
    "queries of other heads": (
        "mixed rows, head size 80",
        lambda batch: replace(batch, queries=np.stack([np.roll(query, 1, axis=0) for query in batch.queries])),
    ),
    "a page too far": ("prompt of whole pages", lambda batch: replace(batch, page_tables=np.roll(batch.page_tables, 1, axis=1))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_notices(fault: str) -> None:
    """A path that is right but for one thing fails on the batch made for that thing, in either dtype, or reads out of the pool."""
    name, broken = FAULTS[fault]
    for check in (check_float32, check_bfloat16):
        with pytest.raises((AssertionError, IndexError)):
            check(lambda batch: expected(broken(batch)), FIXED_BATCHES[name])
