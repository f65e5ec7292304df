"""Drawing a batch of tokens on the device: what :mod:`pddbridge.draw_plan` asks, by reductions alone.

No sort, no scan and no gather, which accelerators do slowly: every border (the k-th logit, the nucleus, the drawn id) is the greatest key
for which a sum over the tokens at or above it suffices, found bit by bit. Sums are of int64, which a TPU makes of two words, exactly; so
the program is compiled with 64-bit types on, and they appear nowhere outside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pddbridge.draw_plan import ONE, ORDER_ROUNDING, DrawArrays, scale_bits, weight_error

_SIGN = 1 << 31


def draw(logits: jax.Array, highest: jax.Array, ids: jax.Array, plan: DrawArrays) -> tuple[jax.Array, jax.Array]:
    """Of float32 ``logits`` [vocab, S] with maxima ``highest`` [S], at ``ids`` [S] i32: the drawn ids, those given where nothing is drawn,
    [S] i32; and the margins [S] f32. Traced with 64-bit types on.
    """
    vocab_size, num_rows = logits.shape
    bits = max(1, (vocab_size - 1).bit_length())
    gap = highest - logits
    later = ((1 << bits) - 1) - jnp.arange(vocab_size, dtype=jnp.int64)[:, None]
    rank = (_ordered(logits) << bits) | later
    weights = (weights_of(gap, plan.temperature) * jnp.float32(2.0 ** scale_bits(vocab_size))).astype(jnp.int64)
    zeros = jnp.zeros(num_rows, jnp.int64)

    def kth() -> jax.Array:
        return _border(rank, jnp.ones_like(rank), plan.top_k.astype(jnp.int64), bits + 32)

    kept = rank >= jax.lax.cond((plan.top_k < vocab_size).any(), kth, lambda: zeros)
    mass = jnp.where(kept, weights, 0)
    total = mass.sum(axis=0)
    has_nucleus = plan.top_p_low < ONE

    def nucleus() -> tuple[jax.Array, jax.Array]:
        need = jnp.maximum(jnp.stack([_share(plan.top_p_low, total), _share(plan.top_p_high, total)]), 1)
        low, high = (jnp.where(has_nucleus, _border(rank, mass, one, bits + 32), 0) for one in need)
        return low, high

    low, high = jax.lax.cond(has_nucleus.any(), nucleus, lambda: (zeros, zeros))
    surely, perhaps = kept & (rank >= low), kept & (rank >= high)
    low_gap, low_tolerance, low_confused = _confusion(logits, gap, highest, kept, low >> bits, has_nucleus, plan)
    high_gap, high_tolerance, high_confused = _confusion(logits, gap, highest, kept, high >> bits, has_nucleus, plan)
    surely &= ~(low_confused & (gap >= low_gap - low_tolerance)) & (gap <= plan.min_p_sure)
    perhaps |= kept & high_confused & (gap <= high_gap + high_tolerance)
    perhaps &= gap <= plan.min_p_possible

    sure = jnp.where(surely, weights, 0)
    unsure = jnp.where(perhaps & ~surely, weights, 0)
    num_sure, num_unsure = sure.sum(axis=0), unsure.sum(axis=0)
    target = _share(plan.u, num_sure)
    drawn = _border(later, sure, target + 1, bits)
    before, up_to = jnp.where(later > drawn, sure, 0).sum(axis=0), jnp.where(later >= drawn, sure, 0).sum(axis=0)
    unsure_before, unsure_after = jnp.where(later > drawn, unsure, 0).sum(axis=0), jnp.where(later < drawn, unsure, 0).sum(axis=0)
    least = jnp.minimum(target - before - _share(ONE - plan.u, unsure_before), up_to - target - _share(plan.u, unsure_after))
    token = jnp.clip(((1 << bits) - 1) - drawn, 0, vocab_size - 1).astype(jnp.int32)
    return jnp.where(plan.drawn, token, ids), least.astype(jnp.float32) / (num_sure + num_unsure).astype(jnp.float32)


def weights_of(gap: jax.Array, temperature: jax.Array) -> jax.Array:
    """float32, 1 where ``gap`` is 0."""
    return jnp.exp(-(gap / temperature))


def measured_error(device: jax.Device) -> float:
    """:func:`pddbridge.draw_plan.weight_error` of ``device``."""

    def weights(gap: np.ndarray, temperature: np.ndarray) -> np.ndarray:
        return np.asarray(jax.jit(weights_of)(jax.device_put(gap, device), jax.device_put(temperature, device)))

    return weight_error(weights)


def _ordered(logits: jax.Array) -> jax.Array:
    """float32 as int64 in [0, 2**32) in the same order; both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, jnp.float32(0), logits), jnp.int32).astype(jnp.int64)
    return jnp.where(bits < 0, -1 - bits, bits + _SIGN)


def _unordered(values: jax.Array) -> jax.Array:
    bits = jnp.where(values < _SIGN, -1 - values, values - _SIGN)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def _border(keys: jax.Array, parts: jax.Array, need: jax.Array, bits: int) -> jax.Array:
    """The greatest number [S] of ``bits`` bits with a sum of at least ``need`` [S] over the ``parts`` [vocab, S] whose ``keys`` ([vocab, S]
    or [vocab, 1]) are not below it; 0 if there is none.
    """

    def step(turn: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.int64(1) << (bits - 1 - turn).astype(jnp.int64))
        return jnp.where(jnp.where(keys >= tried, parts, 0).sum(axis=0) >= need, tried, found)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros(need.shape, jnp.int64))


def _share(share: jax.Array, total: jax.Array) -> jax.Array:
    """``share / ONE * total`` of an int64 ``total`` in [0, 2**62], rounded down by less than 2."""
    parts = share.astype(jnp.int64)
    return (((total >> 32) * parts) << 2) + (((total & 0xFFFFFFFF) * parts) >> 30)


def _confusion(
    logits: jax.Array, gap: jax.Array, highest: jax.Array, kept: jax.Array, border: jax.Array, has_nucleus: jax.Array, plan: DrawArrays
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the nucleus border at the ordered logit ``border`` [S]: its gap, how far from it an order is not sure, and whether any logit but
    its own is as near as that.
    """
    logit = _unordered(border)
    border_gap = highest - logit
    tolerance = plan.order_tolerance + jnp.float32(ORDER_ROUNDING) * border_gap
    near = kept & (logits != logit) & (jnp.abs(gap - border_gap) <= tolerance)
    return border_gap, tolerance, has_nucleus & near.any(axis=0)
