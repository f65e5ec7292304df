"""Learned figures as ratios of sums that decay: seconds per token, shares. No clock."""

from __future__ import annotations


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
