"""What every path of ragged paged attention owes: fixed and drawn batches, and the comparison with the float64 reference.

A path's test file supplies an adapter from :class:`RaggedBatch` to float64 [T, heads, dim] and runs it over these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from pddkernels.ragged_paged_attention import reference
from pddkernels.shapes import MODEL_SHAPES
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, make_batch

FLOAT32_ERROR: Final = 1e-5  # absolute, on unit normal values
# Of each output vector's norm, against float64 of the rounded inputs. Vectors of a few values can cancel to a norm near zero, which says
# nothing: heads smaller than 64 are for float32 alone.
BFLOAT16_RELATIVE_ERROR: Final = 2e-2

# The page size equals the number of KV heads, and contexts are around page boundaries: where axes or counts could be mixed up.
_BOUNDARY_ROWS = (RowSpec(0, 1), RowSpec(3, 1), RowSpec(4, 1), RowSpec(5, 1), RowSpec(4, 4), RowSpec(3, 2), RowSpec(8, 0), RowSpec(0, 9))
_MIXED_ROWS = (
    RowSpec(37, 1),
    RowSpec(0, 33),
    RowSpec(16, 1),
    RowSpec(5, 3),
    RowSpec(0, 0),
    RowSpec(15, 17),
    RowSpec(47, 1),
    RowSpec(31, 2),
)

# Head sizes are such that every path can run them: 64, 80, 96, 128 and 256, each at least once; so are one KV head, and one query head
# per KV head.
FIXED_BATCHES: Final[dict[str, BatchSpec]] = {
    "page size is kv heads": BatchSpec(_BOUNDARY_ROWS, num_kv_heads=4, group=2, dim=64, page_size=4, share_prefix=True),
    "as many tokens as rows": BatchSpec((RowSpec(9, 0), RowSpec(5, 2)), num_kv_heads=2, group=3, dim=64, page_size=16),
    "one token": BatchSpec((RowSpec(0, 1),), num_kv_heads=2, group=3, dim=64, page_size=16),
    "prompt of whole pages": BatchSpec((RowSpec(0, 32), RowSpec(16, 16), RowSpec(32, 1)), num_kv_heads=3, group=3, dim=64, page_size=16),
    "one past whole pages": BatchSpec((RowSpec(0, 33), RowSpec(16, 17), RowSpec(33, 1)), num_kv_heads=3, group=3, dim=64, page_size=16),
    "mixed rows, head size 80": BatchSpec(_MIXED_ROWS, num_kv_heads=2, group=4, dim=80, page_size=12),
    "mixed rows, head size 96": BatchSpec(_MIXED_ROWS, num_kv_heads=1, group=9, dim=96, page_size=16, share_prefix=True),
    "long chunk": BatchSpec((RowSpec(21, 300), RowSpec(17, 1)), num_kv_heads=1, group=3, dim=64, page_size=16),
    "many decode rows": BatchSpec(
        tuple(RowSpec(context_len, 1) for context_len in (410, 3, 390, 250, 12, 400)), 4, 1, 64, page_size=12, share_prefix=True
    ),
    "window": BatchSpec(_MIXED_ROWS, num_kv_heads=2, group=2, dim=128, page_size=4, window=9),
    "window of one": BatchSpec(_MIXED_ROWS, num_kv_heads=2, group=1, dim=64, page_size=16, window=1),
    "window of a page": BatchSpec(_MIXED_ROWS, num_kv_heads=1, group=4, dim=64, page_size=16, window=16),
    "window far behind": BatchSpec((RowSpec(400, 1), RowSpec(700, 40), RowSpec(20, 1)), 2, 2, 64, page_size=16, window=50, soft_cap=2.0),
    "soft cap": BatchSpec(_MIXED_ROWS, num_kv_heads=2, group=2, dim=256, page_size=12, soft_cap=0.7),
    "sinks": BatchSpec(_MIXED_ROWS, num_kv_heads=2, group=8, dim=64, page_size=16, sinks=True),
    "window, cap and sinks": BatchSpec(_MIXED_ROWS, 3, 3, 64, page_size=3, window=21, soft_cap=2.0, sinks=True),
}

# The heads of real models on a batch of a decode row, one at a page's end, an extend. Windows are shorter than the models', to be felt.
REAL_BATCHES: Final[dict[str, BatchSpec]] = {
    name: BatchSpec(
        (RowSpec(33, 1), RowSpec(16, 1), RowSpec(5, 9)),
        num_kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        dim=shape.head_dim,
        page_size=16,
        window=None if shape.windows == (None,) else 11,
        soft_cap=shape.soft_cap,
        sinks=shape.sinks,
    )
    for name, shape in MODEL_SHAPES.items()
}

# Gives float64 (or wider than the batch's dtype) [T, heads, dim].
AttentionPath = Callable[[RaggedBatch], np.ndarray]


def expected(batch: RaggedBatch) -> np.ndarray:
    """float64 [T, heads, dim]."""
    return reference.ragged_paged_attention(
        batch.queries,
        batch.k_pages,
        batch.v_pages,
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        batch.options,
        batch.sinks,
    )


def check_float32(path: AttentionPath, spec: BatchSpec) -> None:
    batch = make_batch(spec)
    got, want = path(batch), expected(batch)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= FLOAT32_ERROR


def check_bfloat16(path: AttentionPath, spec: BatchSpec) -> None:
    assert spec.dim >= 64
    batch = make_batch(spec).rounded()
    got, want = path(batch), expected(batch)
    assert got.shape == want.shape
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= BFLOAT16_RELATIVE_ERROR


def check_attention(path: AttentionPath, spec: BatchSpec) -> None:
    """Both dtypes. NaN anywhere in the result fails, so reading a slot that no row may read fails."""
    check_float32(path, spec)
    check_bfloat16(path, spec)
