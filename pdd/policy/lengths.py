"""How long answers get, learned per tenant. No clock: weight decays by sample. Memory is bounded by the number of tenants."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass
from math import ceil, floor, log2

# Lengths fall into buckets that grow by a factor of 2^(1/4), so a quantile is at most 19 % too long. 80 buckets reach a million tokens.
_BUCKETS_PER_OCTAVE = 4
_NUM_BUCKETS = 80


@dataclass(frozen=True)
class LengthPrediction:
    """Tokens that the answer will have, at most the request's limit. ``high_tokens``: not exceeded with the configured probability."""

    median_tokens: int
    high_tokens: int


class LengthHistogram:
    """Lengths of answers with decaying weight. An answer that was cut at its limit says only that it would have been at least as long;
    quantiles are the product-limit estimate (Kaplan and Meier 1958) over both kinds.
    """

    def __init__(self, half_life: int) -> None:
        """``half_life``: in samples."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next sample; the past decays by what comes later weighing more
        self._ended = [0.0] * _NUM_BUCKETS
        self._cut = [0.0] * _NUM_BUCKETS
        self._used: list[int] = []  # buckets that have had a sample, in order: a few of all
        self.num_samples = 0

    def observe(self, tokens: int, cut: bool) -> None:
        """An answer of ``tokens``; ``cut``: by its limit."""
        bucket = _bucket(tokens)
        if bucket not in self._used:
            insort(self._used, bucket)
        (self._cut if cut else self._ended)[bucket] += self._weight
        self.num_samples += 1
        self._weight *= self._growth
        if self._weight > 1e9:
            self._ended = [value / self._weight for value in self._ended]
            self._cut = [value / self._weight for value in self._cut]
            self._weight = 1.0

    def quantile(self, share: float) -> int | None:
        """The length that ``share`` of answers do not exceed; None when so many were cut that it cannot be told."""
        at_risk = sum(self._ended) + sum(self._cut)
        survived = 1.0
        for bucket in self._used:
            ended, cut = self._ended[bucket], self._cut[bucket]
            if ended > 0:
                survived *= 1.0 - min(1.0, ended / at_risk)
                if 1.0 - survived >= share - 1e-9:
                    return _longest(bucket)
            at_risk -= ended + cut
            if at_risk <= 1e-12:
                return None
        return None


class LengthEstimator:
    """Of each of the latest tenants, and of all together for those that are not known well enough."""

    def __init__(self, quantile: float, min_samples: int, half_life: int, max_tenants: int) -> None:
        self._quantile = quantile
        self._min_samples = min_samples
        self._half_life = half_life
        self._max_tenants = max_tenants
        self._all = LengthHistogram(half_life)
        self._tenants: OrderedDict[str, LengthHistogram] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def observe(self, tenant: str, tokens: int, cut: bool) -> None:
        """A request of ``tenant`` has ended with ``tokens``, of its own or, ``cut``, at its limit."""
        self._all.observe(tokens, cut)
        histogram = self._tenants.get(tenant)
        if histogram is None:
            histogram = self._tenants[tenant] = LengthHistogram(self._half_life)
        self._tenants.move_to_end(tenant)
        histogram.observe(tokens, cut)
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)

    def predict(self, tenant: str, max_tokens: int) -> LengthPrediction:
        """Where too little is known: ``max_tokens``, which is never too short."""
        histogram = self._tenants.get(tenant)
        if histogram is None or histogram.num_samples < self._min_samples:
            histogram = self._all
        if histogram.num_samples < self._min_samples:
            return LengthPrediction(max_tokens, max_tokens)
        median, high = histogram.quantile(0.5), histogram.quantile(self._quantile)
        return LengthPrediction(_at_most(median, max_tokens), _at_most(high, max_tokens))


def _at_most(tokens: int | None, max_tokens: int) -> int:
    return max_tokens if tokens is None else min(tokens, max_tokens)


def _bucket(tokens: int) -> int:
    """Bucket 0 is one token."""
    return min(_NUM_BUCKETS - 1, ceil(_BUCKETS_PER_OCTAVE * log2(max(1, tokens)) - 1e-9))


def _longest(bucket: int) -> int:
    return floor(2.0 ** (bucket / _BUCKETS_PER_OCTAVE) + 1e-9)
