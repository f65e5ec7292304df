"""What each of several senders on one line gets, from what each tells of itself. No clock: the time is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping

# What a sender tells is of its latest two seconds of traffic, and up to a second old: after so long with the same others beside it, it is
# of what they leave it.
SETTLED_S = 4.0


class LineRate:
    """Senders share a line as they come. When another begins, each goes on telling for a while what it got before; so together they are
    taken to get no more than the line is known for: what they told after some time with one another, or one did alone.
    """

    def __init__(self) -> None:
        self._senders: frozenset[str] = frozenset()
        self._since_s = 0.0
        self._line_bytes_s = 0.0
        self._shares: dict[str, float] = {}

    def shares(self, now_s: float, told: Mapping[str, float | None]) -> dict[str, float]:
        """``told``: bytes per second of those that send now, None of one that has told nothing, which is left out. Time never goes back."""
        known = {sender: rate for sender, rate in told.items() if rate}
        if told.keys() != self._senders:
            self._senders, self._since_s = frozenset(told), now_s
        if len(known) == len(told) > 0:
            if now_s - self._since_s >= SETTLED_S:
                self._line_bytes_s = sum(known.values())
            elif len(known) == 1:
                self._line_bytes_s = max(self._line_bytes_s, *known.values())
        share = max(self._line_bytes_s, *known.values(), 0.0) / len(told) if len(told) > 1 and self._line_bytes_s else math.inf
        self._shares = {sender: min(rate, share) for sender, rate in known.items()}
        return self._shares

    def share_bytes_s(self, sender: str) -> float | None:
        """What ``sender`` gets of the line now, or will if it begins. None while that is not known."""
        if sender in self._shares or not self._line_bytes_s:
            return self._shares.get(sender)
        return self._line_bytes_s / len(self._senders | {sender})
