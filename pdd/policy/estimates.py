"""Learned figures: ratios of sums that decay (seconds per token, shares), and how late predictions were. No clock: time is an argument."""

from __future__ import annotations

_NEWS_WEIGHT = 0.3


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
