"""The prefix hit rates of prefill and main, watched as a pair: where main falls behind, more crosses the link, and more is relayed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class HitRates:
    """Shares of prompt tokens that were found. ``gap``: prefill's less main's; None each while there is nothing to go by."""

    prefill: float | None
    main: float | None
    gap: float | None
    num_requests: int


@dataclass(frozen=True)
class _LookUp:
    at_s: float
    tokens: int
    prefill_hit: int
    main_hit: int


class HitWindow:
    """Look-ups of the latest requests that both sides are known of. One that main held whole says nothing of prefill, which was not
    asked, and counts as equal: nothing that prefill may hold was missing at main.
    """

    def __init__(self, window: int, window_s: float) -> None:
        self._window_s = window_s
        self._window = window
        self._latest: deque[_LookUp] = deque()
        self._tokens = self._prefill = self._main = 0

    def observe(self, at_s: float, tokens: int, prefill_hit: int | None, main_hit: int) -> None:
        """``tokens``: that were looked up · ``prefill_hit``: None if prefill was not asked. ``at_s`` never goes back."""
        found = _LookUp(at_s, tokens, main_hit if prefill_hit is None else prefill_hit, main_hit)
        self._latest.append(found)
        self._count(found, 1)
        self._forget(at_s)

    def rates(self, now_s: float) -> HitRates:
        self._forget(now_s)
        if not self._tokens:
            return HitRates(None, None, None, len(self._latest))
        prefill, main = self._prefill / self._tokens, self._main / self._tokens
        return HitRates(prefill, main, prefill - main, len(self._latest))

    def _forget(self, now_s: float) -> None:
        while self._latest and (len(self._latest) > self._window or now_s - self._latest[0].at_s > self._window_s):
            self._count(self._latest.popleft(), -1)

    def _count(self, found: _LookUp, sign: int) -> None:
        self._tokens += sign * found.tokens
        self._prefill += sign * found.prefill_hit
        self._main += sign * found.main_hit
