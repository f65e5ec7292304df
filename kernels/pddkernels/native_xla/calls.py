"""The native kernels as XLA calls them on a CPU: compiled on first use with jaxlib's headers, registered once in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from pddkernels.native.build import compiled
from pddkernels.ragged_paged_attention.options import AttentionOptions

_SOURCES: Final = Path(__file__).parent
_TARGETS: Final = ("pdd_product", "pdd_product_int8", "pdd_attend_decode", "pdd_attend_ragged", "pdd_layer", "pdd_head")
_COLUMNS: Final = (1, 4, 8, 16)
_INT8_COLUMNS: Final = (1, 2, 4)  # or a multiple of 8
MAX_HEAD_DIM: Final = 512  # native/numbers.h

_registering: Final = threading.Lock()
_registered: Final[set[str]] = set()
_crosses: Final[list[bool]] = []


def load(cache_dir: str | None) -> None:
    """Make the calls below possible; what was registered first serves every ``cache_dir``, for XLA takes a name once. Raises
    NativeUnavailableError. See :func:`pddkernels.native.build.compiled`.
    """
    with _registering:
        if len(_registered) < len(_TARGETS):
            _register(cache_dir)


def _register(cache_dir: str | None) -> None:
    flags = ("-isystem", jax.ffi.include_dir())
    library = compiled(f"native-xla-{jaxlib.__version__}", _SOURCES, flags, cache_dir)
    for target in _TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        _registered.add(target)
    _crosses.append(bool(library.pdd_crosses()))


def crosses() -> bool:
    """Whether products whose inputs cross (``panels.h``) take less time on this processor. After :func:`load`."""
    return _crosses[0]


def has_product(weight: jax.Array, x: jax.Array) -> bool:
    """Whether :func:`product` takes these: float32, and as few columns as it is for, or weights in int8 with bfloat16."""
    if weight.dtype == jnp.int8:
        return x.dtype == jnp.bfloat16
    return weight.dtype == x.dtype == jnp.float32 and x.shape[1] <= _COLUMNS[-1]


def product(weight: jax.Array, x: jax.Array) -> jax.Array:
    """``weight [out, in] @ x [in, T]``, sums in float32. With int8 weights a column's do not depend on the others."""
    num_columns = x.shape[1]
    if weight.dtype == jnp.int8:
        padded = next((columns for columns in _INT8_COLUMNS if columns >= num_columns), -(-num_columns // 8) * 8)
        columns = jnp.pad(x, ((0, 0), (0, padded - num_columns))).T
        return _call("pdd_product_int8", (weight.shape[0], padded))(weight, columns)[:, :num_columns]
    padded = next(columns for columns in _COLUMNS if columns >= num_columns)
    out = _call("pdd_product", (weight.shape[0], padded))(weight, jnp.pad(x, ((0, 0), (0, padded - num_columns))))
    return out[:, :num_columns]


def has_attention(kv_dtype: jnp.dtype) -> bool:
    """Whether pages of a KV dtype can be attended to: float32, and bfloat16 kept as uint16."""
    return kv_dtype in (jnp.float32, jnp.bfloat16)


def attend_decode(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    context_lens: jax.Array,
    num_new: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See :meth:`pddkernels.jax_ops.JaxOps.attend_decode`; a row's numbers do not depend on the others. Float32 [R, heads, dim]."""
    return _attend("pdd_attend_decode", queries, (pages, page_tables, context_lens, num_new), options, sinks)


def attend_ragged(
    queries: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    row_starts: jax.Array,
    context_lens: jax.Array,
    num_rows: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """``queries`` [T, heads, dim], rows back to back, ``row_starts`` [R+1], ``context_lens`` [R], of which ``num_rows`` [1] are valid.

    Returns float32 [T, heads, dim]; zeros for tokens of no row. A row of one token is computed as in a decode step.
    """
    return _attend("pdd_attend_ragged", queries, (pages, page_tables, row_starts, context_lens, num_rows), options, sinks)


def _attend(target: str, queries: jax.Array, rows: tuple[jax.Array, ...], options: AttentionOptions, sinks: jax.Array | None) -> jax.Array:
    return _call(target, queries.shape)(
        queries.astype(jnp.float32),
        *rows,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(options.scale),
        soft_cap=np.float32(options.soft_cap or 0),
        window=np.int64(options.window or 0),
    )


def _call(target: str, shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    call: Callable[..., jax.Array] = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call
