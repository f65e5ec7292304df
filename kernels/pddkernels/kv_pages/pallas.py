"""KV pages on a TPU in Pallas: write tokens to slots and read them, by the DMA engines alone.

Pages are as in :mod:`pddkernels.kv_pages.portable_xla`, padded as :mod:`pddkernels.ragged_paged_attention.pallas` wants them. No value
passes through a vector register: rows of [planes, lanes] go from HBM to HBM, bit for bit. Tokens that fill a page in order are one copy,
others one copy each; a batch of copies is in flight before the first is waited for.

``slots`` [T] i32 ascend by one from token to token of a request within a page, as positions do, and no two requests of a call share a page;
those past the pool are padding.
"""

from __future__ import annotations

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Copies that are started before the first is waited for.
_IN_FLIGHT: Final = 32


def put(pages: jax.Array, stored: jax.Array, slots: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Write ``stored`` [T, planes, lanes] to ``slots`` [T], in place where ``pages`` [N, page_size, planes, lanes] is donated."""
    return _call(functools.partial(_move, to_pages=True), pages, stored, slots, out=pages, aliases={1: 0}, interpret=interpret)


def gather(pages: jax.Array, slots: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Read ``slots`` [T] -> [T, planes, lanes]; zeros for slots past the pool."""
    zeros = jnp.zeros((slots.shape[0], *pages.shape[2:]), pages.dtype)
    return _call(functools.partial(_move, to_pages=False), pages, zeros, slots, out=zeros, aliases={2: 0}, interpret=interpret)


def _call(
    kernel: functools.partial[None],
    pages: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    *,
    out: jax.Array,
    aliases: dict[int, int],
    interpret: bool,
) -> jax.Array:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    moved: jax.Array = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases=aliases,
        interpret=interpret,
        name="pdd_kv_put" if out is pages else "pdd_kv_gather",
    )(slots, pages, rows)
    return moved


def _move(slots: jax.Array, pages: jax.Array, rows: jax.Array, out: jax.Array, done: jax.Array, *, to_pages: bool) -> None:
    num_pages, page_size = pages.shape[:2]
    num_tokens = slots.shape[0]
    has_whole = 1 < page_size <= num_tokens

    def copy(token: jax.Array | int, page: jax.Array | int, place: jax.Array | int, count: int, *, wait: bool) -> None:
        """Of ``count`` tokens, 1 or ``page_size``; each kind has its semaphore, so that what is waited for is a whole copy."""
        paged, flat = (out, rows) if to_pages else (pages, out)
        in_page, in_rows = paged.at[page, pl.ds(place, count)], flat.at[pl.ds(token, count)]
        source, destination = (in_rows, in_page) if to_pages else (in_page, in_rows)
        moving = pltpu.make_async_copy(source, destination, done.at[int(count > 1)])
        if wait:
            moving.wait()
        else:
            moving.start()

    def start(wanted: jax.Array, in_flight: jax.Array, token: jax.Array, page: jax.Array, place: jax.Array, count: int) -> jax.Array:
        """Start a copy if it is ``wanted``, and wait for one of its kind if too many are in flight; gives how many are."""
        pl.when(wanted)(lambda: copy(token, page, place, count, wait=False))
        in_flight += wanted.astype(jnp.int32)
        pl.when(in_flight > _IN_FLIGHT)(lambda: copy(0, 0, 0, count, wait=True))
        return jnp.minimum(in_flight, _IN_FLIGHT)

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        token, singles, wholes = state
        slot = slots[token]
        page, place = slot // page_size, slot % page_size
        is_kept, is_whole = page < num_pages, jnp.bool_(False)
        if has_whole:
            # Both ends of the page in their places: what is between is of the same request, so it is there too.
            last = slots[jnp.minimum(token + page_size, num_tokens) - 1]
            is_whole = (place == 0) & (token + page_size <= num_tokens) & (last == slot + page_size - 1)
            wholes = start(is_kept & is_whole, wholes, token, page, jnp.int32(0), page_size)
        singles = start(is_kept & jnp.logical_not(is_whole), singles, token, page, place, 1)
        return token + jnp.where(is_whole, page_size, 1), singles, wholes

    zero = jnp.int32(0)
    _, singles, wholes = jax.lax.while_loop(lambda state: state[0] < num_tokens, step, (zero, zero, zero))
    jax.lax.fori_loop(0, singles, lambda *_: copy(0, 0, 0, 1, wait=True), None)
    if has_whole:
        jax.lax.fori_loop(0, wholes, lambda *_: copy(0, 0, 0, page_size, wait=True), None)
