"""Learned figures: ratios of sums that decay (seconds per token, shares), how times are spread, and how late predictions were. No clock:
time is an argument.
"""

from __future__ import annotations

from math import floor, log2

_NEWS_WEIGHT = 0.3
# Times fall into buckets that grow by a factor of 2^(1/16), so a quantile is off by 2 % at most. From 0.1 ms to 100 s.
_BUCKETS_PER_OCTAVE = 16
_LEAST_S = 1e-4
_NUM_BUCKETS = 20 * _BUCKETS_PER_OCTAVE


class Ratio:
    """Sum over sum. ``half_life``: an old sample has lost half its weight after so much more of the lower sum."""

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        self._upper = 0.0
        self._lower = 0.0

    def observe(self, upper: float, lower: float) -> None:
        """Nothing per nothing says nothing and is ignored."""
        if lower <= 0:
            return
        kept = 0.5 ** (lower / self._half_life)
        self._upper = self._upper * kept + upper
        self._lower = self._lower * kept + lower

    @property
    def value(self) -> float | None:
        """None until something was observed."""
        return self._upper / self._lower if self._lower > 0 else None


class Spread:
    """Quantiles of times. ``half_life``: in samples, after which one has lost half its weight."""

    def __init__(self, half_life: int) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next sample; the past decays by what comes later weighing more
        self._buckets = [0.0] * _NUM_BUCKETS

    def observe(self, seconds: float) -> None:
        octaves = log2(max(_LEAST_S, seconds) / _LEAST_S)
        self._buckets[min(_NUM_BUCKETS - 1, floor(_BUCKETS_PER_OCTAVE * octaves))] += self._weight
        self._weight *= self._growth
        if self._weight > 1e9:
            self._buckets = [weight / self._weight for weight in self._buckets]
            self._weight = 1.0

    def quantile_s(self, share: float) -> float | None:
        """What ``share`` of the times do not exceed: the middle of its bucket. None until something was observed."""
        left = share * sum(self._buckets)
        last: int | None = None
        for bucket, weight in enumerate(self._buckets):
            if weight > 0:
                left -= weight
                last = bucket
                if left <= 0:
                    break
        return None if last is None else _LEAST_S * 2.0 ** ((last + 0.5) / _BUCKETS_PER_OCTAVE)


class Lateness:
    """How much later than predicted things have come lately; never below 0. Smoothed over the latest few, and halved every ``half_life_s``
    without news, so that what was given up for being late is tried again.
    """

    def __init__(self, half_life_s: float, most_s: float) -> None:
        self._half_life_s = half_life_s
        self._most_s = most_s
        self._value_s = 0.0
        self._at_s = 0.0

    def observe(self, now_s: float, error_s: float) -> None:
        """One came ``error_s`` later than predicted, or sooner if that is negative."""
        before_s = self.value_s(now_s)
        self._value_s = min(self._most_s, max(0.0, before_s + _NEWS_WEIGHT * (error_s - before_s)))
        self._at_s = now_s

    def value_s(self, now_s: float) -> float:
        return self._value_s * 0.5 ** ((now_s - self._at_s) / self._half_life_s)
