"""Figures of a run whose length is not bounded: histograms of a fixed size, so that memory stays flat over millions of requests."""

from __future__ import annotations

import math
from collections import Counter

_PER_DECADE = 230  # buckets grow by 1 %: a percentile is within half of that
_LOWEST = 1e-6


class Histogram:
    """Of positive values over a bounded number of buckets, each 1 % wide; zero has a bucket of its own."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._zeros = 0
        self.num = 0
        self.total = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value
        if value < _LOWEST:
            self._zeros += 1
        else:
            self._buckets[math.floor(math.log10(value / _LOWEST) * _PER_DECADE)] += 1

    @property
    def mean(self) -> float:
        return self.total / self.num if self.num else 0.0

    def quantile(self, share: float) -> float:
        """The middle of the bucket that ``share`` of the values reach; 0 for no values."""
        wanted = share * self.num
        seen = float(self._zeros)
        if seen >= wanted:
            return 0.0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return float(_LOWEST * 10 ** ((bucket + 0.5) / _PER_DECADE))
        return 0.0

    def summary(self) -> dict[str, float]:
        return {"mean": _short(self.mean), **{f"p{p}": _short(self.quantile(p / 100)) for p in (50, 90, 99)}}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
