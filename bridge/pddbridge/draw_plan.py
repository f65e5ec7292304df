"""Drawing tokens on a device so that they are the host sampler's: which rows, their parameters as arrays, and when to doubt what came back.

:func:`pddbridge.sampling.sample` stays the definition. A device repeats its steps 5 to 9 for a batch of rows and tells with each token
the *margin*: by what share of the probability the number ``u`` would have to move for another token. The host takes the token if the
margin is more than everything that rounding, there or here, can have moved; else it fetches the row and draws itself. So no token
depends on where it was drawn. Rows that need the history or a record stay with the host: penalties, bias, masks, log-probabilities.

A device computes, per row (``gap`` = largest logit - logit, float32, exact as here; ``s = gap / temperature``; ``w = exp(-s)``):

1. ``q = floor(w * 2**scale_bits(V))`` as int64, so that sums are exact in any order, whatever runs beside the row;
2. K, what top-k keeps: an order by (logit, lowest id first), which has no rounding in it;
3. two borders in that order, where the share of K's sum reaches ``top_p_low`` and ``top_p_high``: a token before the first is surely in
   the host's nucleus, one past the second surely not. Different logits whose gaps are within ``order_tolerance + ORDER_ROUNDING * gap``
   of a border's may stand in another order on the host, whose weights are rounded: then all of them are neither;
4. min-p likewise: surely kept up to the gap ``min_p_sure``, perhaps up to ``min_p_possible``;
5. the token t of ``u`` in the cumulative sum of what is surely kept, C. D is what is perhaps kept as well. With D in any combination t
   stays, in exact arithmetic, if both of these are positive; the margin is the smaller over the sum of C and D:
   ``u * sum(C) - sum(C before t) - (1 - u) * sum(D before t)`` and ``sum(C up to t) - u * sum(C) - u * sum(D after t)``.

What rounding moves. Let every weight be wrong by a factor within 1 +- e. A cumulative share f then becomes f' with odds within
``(1 + e) / (1 - e) = 1 + d``, so ``|f' - f| <= d f (1 - f)``; and as f (1 - f) has a slope of at most 1, no share that is further than
``d u (1 - u) / (1 - d)`` from u can change sides. e is numpy's float32 exp (:data:`HOST_EXP_ERROR`) and the device's quotient and exp,
which :func:`weight_error` measures. To this comes, absolutely, what ``floor`` loses, V * 2**-scale_bits, twice since sums are divided; the
host's float64 sums, V * 2**-52; and u and top_p in units of 2**-30 (:func:`rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from pddbridge.engine import SampleRow
from pddbridge.sampling import needs_host, uniform
from pddbridge.sampling_params import SamplingParams

# numpy's vectorised float32 exp is wrong by 2.52 units in the last place at most (its loops_exponent_log source says so), libm's by less.
HOST_EXP_ERROR: Final = 2.52 * 2**-23
# Shares as integers: 1 is 2**30, so that a product with half of a sum of 62 bits fits int64.
ONE: Final = 1 << 30
# A gap and a quotient are rounded once each on the host, to half a unit of 2**-23; twice that, for the device's own arithmetic with gaps.
ORDER_ROUNDING: Final = 2.0**-22
# Below this a quotient may be no ordinary float32 on a device that flushes what is denormal.
_COLDEST: Final = 2.0**-100
_PROBES: Final = 1 << 16
_SMALLEST_EXPONENT: Final = 60.0  # exp(-60) is less than one part of any q


class DrawArrays(NamedTuple):
    """What the device is told, per row [S]: ``drawn`` bool · ``temperature`` f32 · ``top_k`` i32, the vocabulary's size for none ·
    ``top_p_low``, ``top_p_high`` i32 in parts of :data:`ONE`, both ``ONE`` for none · ``order_tolerance`` f32 in logits ·
    ``min_p_sure``, ``min_p_possible`` f32 in logits, inf for none · ``u`` i32 in parts of ``ONE``, rounded down.
    """

    drawn: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p_low: np.ndarray
    top_p_high: np.ndarray
    order_tolerance: np.ndarray
    min_p_sure: np.ndarray
    min_p_possible: np.ndarray
    u: np.ndarray


@dataclass(frozen=True)
class DrawPlan:
    """``tolerances`` [S] f64: a row's token is the host's if its margin is more than this."""

    arrays: DrawArrays
    tolerances: np.ndarray


def host_reason(params: SamplingParams, position: int) -> str | None:
    """Why a row with a temperature cannot be drawn on a device; None: it can."""
    if 0.0 < params.temperature < _COLDEST:
        return "temperature"
    return needs_host(params, position)


def draw_plan(rows: Sequence[SampleRow], drawn: Sequence[bool], vocab_size: int, device_error: float, size: int) -> DrawPlan:
    """Of the first ``len(rows)`` of ``size`` rows; the others, and those that are not ``drawn``, draw something that means nothing.

    ``device_error``: :func:`weight_error` of the device.
    """
    arrays = DrawArrays(
        drawn=np.zeros(size, np.bool_),
        temperature=np.ones(size, np.float32),
        top_k=np.full(size, vocab_size, np.int32),
        top_p_low=np.full(size, ONE, np.int32),
        top_p_high=np.full(size, ONE, np.int32),
        order_tolerance=np.zeros(size, np.float32),
        min_p_sure=np.full(size, np.inf, np.float32),
        min_p_possible=np.full(size, np.inf, np.float32),
        u=np.zeros(size, np.int32),
    )
    tolerances = np.zeros(size)
    error = HOST_EXP_ERROR + device_error + HOST_EXP_ERROR * device_error
    for i, row in enumerate(rows):
        if drawn[i]:
            params, u = row.params, uniform(row.params.seed, row.position)
            arrays.drawn[i] = True
            arrays.u[i] = math.floor(u * ONE)
            tolerances[i] = moved_share(u, error, vocab_size)
            _set_filters(arrays, i, params, error, vocab_size)
    return DrawPlan(arrays, tolerances)


def _set_filters(arrays: DrawArrays, i: int, params: SamplingParams, error: float, vocab_size: int) -> None:
    temperature = params.temperature
    arrays.temperature[i] = temperature
    if params.top_k is not None:
        arrays.top_k[i] = min(params.top_k, vocab_size)
    # Two of the host's weights are in the order of their quotients if those differ by more than this.
    arrays.order_tolerance[i] = _up(temperature * math.log((1 + HOST_EXP_ERROR) / (1 - HOST_EXP_ERROR)))
    if params.top_p < 1.0:
        moved = moved_share(params.top_p, error, vocab_size)
        arrays.top_p_low[i] = min(max(0, math.floor((params.top_p - moved) * ONE)), ONE - 1)
        arrays.top_p_high[i] = min(ONE, math.ceil((params.top_p + moved) * ONE))
    if params.min_p > 0.0:
        # w >= min_p, where w = exp(-gap / temperature) within HOST_EXP_ERROR, and the quotient within 2**-24.
        most, wrong = -math.log(params.min_p), -math.log(1 - HOST_EXP_ERROR)
        arrays.min_p_sure[i] = max(0.0, _down(temperature * (most - wrong) / (1 + 2**-23)))  # a gap of 0 weighs exactly 1
        arrays.min_p_possible[i] = _up(temperature * (most + wrong) * (1 + 2**-23))


def scale_bits(vocab_size: int) -> int:
    """Binary places of a weight as an integer: all together, each at most 1, stay under 2**62."""
    return 62 - max(1, (vocab_size - 1).bit_length())


def rounding(vocab_size: int) -> float:
    """By what a share can be wrong with exact weights: see the module docstring."""
    return vocab_size * (2.0 ** (1 - scale_bits(vocab_size)) + 2.0**-52) + 2.0**-29


def moved_share(share: float, error: float, vocab_size: int) -> float:
    """How far from ``share`` a cumulative share can be and still be on its other side with weights wrong by a factor of 1 +- ``error``."""
    odds = 2 * error / (1 - error)
    return (odds * share * (1 - share) / (1 - odds) + rounding(vocab_size)) * (1 + 2.0**-20)  # margins come back in float32


def weight_error(weights: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """Twice the largest relative error seen of a device's ``weights(gap, temperature)`` [n] over random quotients, as the host rounds them.

    Raises ValueError for weights that are not 1 at a gap of 0, which everything here rests on.
    """
    random = np.random.default_rng(0)
    temperature = random.uniform(0.05, 5.0, _PROBES).astype(np.float32)
    gap = (random.uniform(0, _SMALLEST_EXPONENT, _PROBES) * random.random(_PROBES) * temperature).astype(np.float32)
    gap[:64] = 0.0
    got = weights(gap, temperature).astype(np.float64)
    if (got[:64] != 1.0).any():
        raise ValueError(f"weights: given {got[:64].tolist()} at a gap of 0, allowed 1")
    return float(2 * np.abs(got / np.exp(-(gap / temperature).astype(np.float64)) - 1).max())


def _up(value: float) -> np.float32:
    return np.nextafter(np.float32(value), np.float32(np.inf))


def _down(value: float) -> np.float32:
    return np.nextafter(np.float32(value), np.float32(-np.inf))
