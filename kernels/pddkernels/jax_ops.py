"""Which path JAX's operations take on a device: the one place where that is chosen, and the only kernels module that the JAX engine calls.

On a TPU that :mod:`pddkernels.ragged_paged_attention.block_sizes` knows the Pallas kernels run; anywhere else the portable XLA path, on a
CPU with native kernels for attention and for products with few columns, which bound a decode step.
Portable where a kernel was to be expected is a *fallback*: named in :attr:`JaxOps.fallbacks`, which the engine shows.

An object stands for one layer's attention on one device: with tensor parallelism its heads are the device's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pddkernels.kv_pages import pallas as pallas_pages
from pddkernels.kv_pages import portable_xla as xla_pages
from pddkernels.native.build import NativeUnavailableError
from pddkernels.native_xla import calls as native_calls
from pddkernels.ragged_paged_attention import portable_xla
from pddkernels.ragged_paged_attention.block_sizes import BlockSizes, block_sizes, generation_of
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.pallas import padded_dim, padded_heads, ragged_paged_attention

logger = logging.getLogger(__name__)

# A TensorCore's scalar memory is 1 MiB (jax.experimental.pallas.tpu.get_tpu_info, jax 0.10.2); page tables may take this much of it.
_TABLES_BYTES: Final = 3 * 2**18


@dataclass(frozen=True)
class JaxOps:
    """``path``: "pallas" or "portable" · ``native``: portable, but for the processor's own kernels where they serve · ``kv_dtype``: of the
    stored KV · ``kv_heads``, ``head_dim``: of one device's attention · ``blocks``: of the Pallas kernel · ``interpret``: run Pallas kernels
    without a TPU, slowly, for tests · ``fallbacks``: why a device that should run kernels does not.

    Pages of a layer: [num_pages, page_size, *``token_shape``] of ``storage_dtype``.
    """

    path: Literal["pallas", "portable"]
    kv_dtype: jnp.dtype
    kv_heads: int
    head_dim: int
    blocks: BlockSizes | None = None
    interpret: bool = False
    fallbacks: tuple[str, ...] = ()
    native: bool = False

    @property
    def storage_dtype(self) -> np.dtype:
        """Two-byte floats are kept as uint16 bits: XLA may lose which NaN it was while it moves a bfloat16."""
        return np.dtype(xla_pages.storage_dtype(self.kv_dtype))

    @property
    def token_shape(self) -> tuple[int, int]:
        """(planes of heads, values) that one token takes in pages; a kernel's are padded as Mosaic needs, with zeros."""
        if self.path == "portable":
            return 2 * self.kv_heads, self.head_dim
        return 2 * padded_heads(self.kv_heads), padded_dim(self.head_dim)

    @property
    def _attends_natively(self) -> bool:
        return self.native and native_calls.has_attention(self.kv_dtype)

    def for_layers(self, compute_dtype: jnp.dtype) -> tuple[bool, JaxOps]:
        """Whether :func:`pddkernels.native_xla.layers.layer` runs a decoder layer in one call here, and these operations, with the reason
        among the fallbacks if only that keeps it from it.
        """
        if not self._attends_natively:
            return False, self
        reasons = []
        if compute_dtype != jnp.float32:
            reasons.append("portable_layers_compute_dtype")
        if self.head_dim > native_calls.MAX_HEAD_DIM:
            reasons.append("portable_layers_head_dim")
        return not reasons, replace(self, fallbacks=(*self.fallbacks, *reasons))

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, num_tokens: int, max_rows: int) -> tuple[np.ndarray, ...]:
        """What :meth:`attend` needs of a step besides page tables: host arrays, their shapes given by ``num_tokens`` and ``max_rows``.

        ``row_starts`` [R+1] with ``row_starts[R] <= num_tokens``, ``context_lens`` [R], R up to ``max_rows``.
        """
        if self.path == "portable" and not self._attends_natively:
            large, small = portable_xla.plan_query_blocks(row_starts, context_lens, num_tokens, max_rows)
            return large.fields, np.asarray(large.count), small.fields, np.asarray(small.count)
        num_rows = len(context_lens)
        starts, lens = np.full(max_rows + 1, row_starts[-1], np.int32), np.zeros(max_rows, np.int32)
        starts[: num_rows + 1], lens[:num_rows] = row_starts, context_lens
        return starts, lens, np.array([num_rows], np.int32)

    def attend(
        self,
        queries: jax.Array,
        pages: jax.Array,
        page_tables: jax.Array,
        plan: tuple[jax.Array, ...],
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Ragged paged attention of any rows: ``queries`` [T, heads, dim], ``page_tables`` [max_rows, P], ``plan`` of :meth:`plan`.

        Returns [T, heads, dim], float32 or the queries' dtype; zeros for tokens of no row.
        """
        if self._attends_natively:
            row_starts, context_lens, num_rows = plan
            return native_calls.attend_ragged(queries, pages, page_tables, row_starts, context_lens, num_rows, options, sinks)
        if self.path == "portable":
            large_fields, large_count, small_fields, small_count = plan
            large, small = (large_fields, large_count), (small_fields, small_count)
            return portable_xla.ragged_attention(queries, pages, page_tables, large, small, options, self.kv_dtype, sinks)
        row_starts, context_lens, num_rows = plan
        return self._kernel(queries, pages, row_starts, context_lens, page_tables, num_rows, options, sinks)

    def attend_decode(
        self,
        queries: jax.Array,
        pages: jax.Array,
        page_tables: jax.Array,
        context_lens: jax.Array,
        num_new: jax.Array,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """One new token per row: ``queries`` [R, heads, dim] · ``context_lens`` [R] · ``num_new`` [R]: 1, then 0 for padding."""
        if self._attends_natively:
            return native_calls.attend_decode(queries, pages, page_tables, context_lens, num_new, options, sinks)
        if self.path == "portable":
            return portable_xla.decode_attention(queries, pages, page_tables, context_lens, num_new, options, self.kv_dtype, sinks)
        row_starts = jnp.arange(queries.shape[0] + 1, dtype=jnp.int32)
        return self._kernel(queries, pages, row_starts, context_lens, page_tables, num_new.sum(keepdims=True), options, sinks)

    def product(self, weight: jax.Array, x: jax.Array) -> jax.Array:
        """``weight [out, in] @ x [in, T]`` -> float32, float32 products exact; weights in int8 are widened to the dtype of ``x``."""
        if self.native and native_calls.has_product(weight, x):
            return native_calls.product(weight, x)
        return jnp.matmul(weight.astype(x.dtype), x, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def append(self, pages: jax.Array, keys: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
        """Store ``keys``, ``values`` [T, kv_heads, dim], rounded to nearest even, at ``slots`` [T] i32; those past the pool are nowhere."""
        return self._put(pages, self._stored(keys, values, round_to=self.kv_dtype), slots)

    def read(self, pages: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V of ``slots`` [N]: [N, kv_heads, dim] each in storage form; zeros for slots past the pool."""
        stored = self._gather(pages, slots)[:, : 2 * self.kv_heads, : self.head_dim]
        return stored[:, 0::2], stored[:, 1::2]

    def write(self, pages: jax.Array, stored: jax.Array, wanted: jax.Array, slots: jax.Array) -> jax.Array:
        """Place ``stored`` [N, kv_heads, dim], in storage form, at ``slots`` [N] where ``wanted`` [2 * kv_heads] bool, k0 v0 k1 v1 ...."""
        wanted = jnp.pad(wanted, (0, self.token_shape[0] - len(wanted)))
        fresh = self._stored(stored, stored, round_to=None)
        return self._put(pages, jnp.where(wanted[None, :, None], fresh, self._gather(pages, slots)), slots)

    def copy_page(self, pages: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
        """Copy all slots of page ``source`` (scalar i32) over page ``destination`` (scalar i32)."""
        if self.path == "portable":
            return xla_pages.copy_page(pages, source, destination)
        places = jnp.arange(pages.shape[1], dtype=jnp.int32)
        return self._put(pages, self._gather(pages, source * len(places) + places), destination * len(places) + places)

    def _put(self, pages: jax.Array, stored: jax.Array, slots: jax.Array) -> jax.Array:
        if self.path == "portable":
            return xla_pages.put(pages, stored, slots)
        return pallas_pages.put(pages, stored, slots, interpret=self.interpret)

    def _gather(self, pages: jax.Array, slots: jax.Array) -> jax.Array:
        if self.path == "portable":
            return xla_pages.gather(pages, slots)
        return pallas_pages.gather(pages, slots, interpret=self.interpret)

    def _stored(self, keys: jax.Array, values: jax.Array, round_to: jnp.dtype | None) -> jax.Array:
        """[T, kv_heads, dim] twice -> [T, *token_shape] in storage form."""
        both = xla_pages.interleave(keys, values)
        if round_to is not None:
            both = xla_pages.encode(both, round_to)
        planes, lanes = self.token_shape
        return jnp.pad(both, ((0, 0), (0, planes - both.shape[1]), (0, lanes - both.shape[2])))

    def _kernel(
        self,
        queries: jax.Array,
        pages: jax.Array,
        row_starts: jax.Array,
        context_lens: jax.Array,
        page_tables: jax.Array,
        num_rows: jax.Array,
        options: AttentionOptions,
        sinks: jax.Array | None,
    ) -> jax.Array:
        assert self.blocks is not None
        return ragged_paged_attention(
            queries,
            pages,
            row_starts,
            context_lens,
            page_tables,
            num_rows,
            options,
            sinks,
            blocks=self.blocks,
            kv_heads=self.kv_heads,
            interpret=self.interpret,
        )


def choose(
    device: jax.Device,
    *,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    kv_dtype: jnp.dtype,
    max_rows: int,
    pages_per_row: int,
    cache_dir: str | None = None,
) -> JaxOps:
    """The operations for one layer's attention on ``device``: the heads it has itself, page tables of [max_rows, pages_per_row].

    ``cache_dir``: where native kernels are kept once compiled; None: they are compiled for this process alone.
    """
    if device.platform == "cpu":
        try:
            native_calls.load(cache_dir)
        except NativeUnavailableError as error:
            logger.warning("%s", error)
            return JaxOps("portable", kv_dtype, kv_heads, head_dim, fallbacks=(error.reason,))
        unserved = () if native_calls.has_attention(kv_dtype) else ("portable_attention_kv_dtype",)
        return JaxOps("portable", kv_dtype, kv_heads, head_dim, fallbacks=unserved, native=True)
    reasons = []
    generation = generation_of(device.device_kind) if device.platform == "tpu" else None
    if generation is None:
        reasons.append("portable_attention_no_kernel_for_device")
    if kv_dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append("portable_attention_kv_dtype")
    if max_rows * pages_per_row * 4 > _TABLES_BYTES:
        reasons.append("portable_attention_page_tables_too_large")
    if generation is None or reasons:
        return JaxOps("portable", kv_dtype, kv_heads, head_dim, fallbacks=tuple(reasons))
    kernels = JaxOps("pallas", kv_dtype, kv_heads, head_dim)
    planes, lanes = kernels.token_shape
    blocks = block_sizes(generation, num_heads=num_heads, token_bytes=planes * lanes * kv_dtype.itemsize)
    return JaxOps("pallas", kv_dtype, kv_heads, head_dim, blocks)
