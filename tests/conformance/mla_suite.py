"""What every path of multi-head latent attention owes: batches and the comparison with the float64 reference, as in ``kernel_suite``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from hypothesis import strategies as st

from pddkernels.mla_decode import reference
from pddkernels.shapes import MLA_SHAPES
from tests.conformance.kernel_suite import BFLOAT16_RELATIVE_ERROR, FLOAT32_ERROR
from tests.support.ragged_batches import BatchSpec, RaggedBatch, RowSpec, batch_specs, make_batch


@dataclass(frozen=True)
class MLASpec:
    """``rows`` over pages of ``page_size`` tokens; everything else as in :class:`BatchSpec`."""

    rows: tuple[RowSpec, ...]
    num_heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    scale: float
    seed: int = 0
    share_prefix: bool = False


@dataclass(frozen=True)
class MLABatch:
    """The arguments of the op: ``q_latent`` [T, heads, latent], ``q_rope`` [T, heads, rope], pages [N, page_size, latent or rope]."""

    q_latent: np.ndarray
    q_rope: np.ndarray
    latent_pages: np.ndarray
    rope_pages: np.ndarray
    row_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray
    scale: float


def ragged_batch(spec: MLASpec) -> RaggedBatch:
    """The batch as attention with one KV head whose keys are latent and rope values side by side."""
    dim = spec.latent_dim + spec.rope_dim
    return make_batch(BatchSpec(spec.rows, 1, spec.num_heads, dim, spec.page_size, spec.seed, spec.share_prefix))


def split(spec: MLASpec, batch: RaggedBatch) -> MLABatch:
    """Planes of their own, contiguous."""
    q_latent, q_rope = (np.ascontiguousarray(part) for part in np.split(batch.queries, [spec.latent_dim], axis=-1))
    latent, rope = (np.ascontiguousarray(part) for part in np.split(batch.k_pages[:, 0], [spec.latent_dim], axis=-1))
    return MLABatch(q_latent, q_rope, latent, rope, batch.row_starts, batch.context_lens, batch.page_tables, spec.scale)


MLAPath = Callable[[MLABatch], np.ndarray]

_V3 = MLA_SHAPES["deepseek-v3"]
_V3_ROWS = (RowSpec(37, 1), RowSpec(15, 1), RowSpec(16, 1), RowSpec(5, 3), RowSpec(0, 0), RowSpec(0, 1))

MLA_BATCHES: Final[dict[str, MLASpec]] = {
    "deepseek-v3": MLASpec(_V3_ROWS, _V3.num_heads, _V3.latent_dim, _V3.rope_dim, page_size=16, scale=_V3.scale),
    # The smallest sizes that matrix instructions take; the page size is the number of heads.
    "page size is heads": MLASpec((RowSpec(0, 1), RowSpec(16, 1), RowSpec(31, 2), RowSpec(15, 9)), 16, 64, 16, 16, 0.1, share_prefix=True),
    "long": MLASpec((RowSpec(700, 1), RowSpec(130, 140), RowSpec(3, 1)), 16, 128, 64, page_size=32, scale=0.07),
}

mla_specs = st.builds(
    lambda spec, sizes: MLASpec(spec.rows, 16, *sizes, spec.page_size, 0.1, spec.seed, spec.share_prefix),
    batch_specs(page_sizes=(1, 12, 16)),
    st.sampled_from(((64, 16), (128, 64))),
)


def expected(batch: MLABatch) -> np.ndarray:
    """float64 [T, heads, latent]."""
    return reference.mla_attention(
        batch.q_latent,
        batch.q_rope,
        batch.latent_pages,
        batch.rope_pages,
        batch.row_starts,
        batch.context_lens,
        batch.page_tables,
        batch.scale,
    )


def check_mla(path: MLAPath, spec: MLASpec) -> None:
    """Both dtypes, the tolerances of the other attention. NaN anywhere in the result fails."""
    exact = ragged_batch(spec)
    batch = split(spec, exact)
    assert np.abs(path(batch) - expected(batch)).max() <= FLOAT32_ERROR
    half = split(spec, exact.rounded())
    want = expected(half)
    error = np.linalg.norm(path(half) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= BFLOAT16_RELATIVE_ERROR
