"""What decides how to hand over, as it was measured on earlier tokens and handoffs of all requests: by worker, the latest few."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from pdd.policy.estimates import Spread

_GAPS = 64
_EXTENDS = 16
# Below this many tokens an extend costs what the step costs, not what its tokens do.
_MIN_EXTEND_TOKENS = 8
# What is usual changes over minutes: so many gaps are half a minute of ten requests at 15 tokens a second, so many delays forty handoffs.
_STEADY_HALF_LIFE = 4096
_DELAY_HALF_LIFE = 256
# Of main's delays, this share is to be covered.
_USUAL = 0.95
# By what share a figure that rests on one overlap is thought to be too low: delays of one main differ about so much.
_DOUBT = 0.5


def _gaps() -> deque[float]:
    return deque(maxlen=_GAPS)


def _steady() -> Spread:
    return Spread(_STEADY_HALF_LIFE)


def _delays() -> Spread:
    return Spread(_DELAY_HALF_LIFE)


def _extends() -> deque[float]:
    return deque(maxlen=_EXTENDS)


@dataclass
class _WorkerFigures:
    gaps_s: deque[float] = field(default_factory=_gaps)
    extend_s_per_token: deque[float] = field(default_factory=_extends)
    steady: Spread = field(default_factory=_steady)
    delays: Spread = field(default_factory=_delays)
    num_overlaps: int = 0


class HandoffFigures:
    """Medians, unless it says otherwise; None until something was measured."""

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerFigures] = {}

    def gap(self, worker: str, gap_s: float) -> None:
        """Between two tokens of one request, both of ``worker``."""
        figures = self._of(worker)
        figures.gaps_s.append(gap_s)
        figures.steady.observe(gap_s)

    def overlap(self, worker: str, delays_s: Sequence[float]) -> None:
        """One is over. ``delays_s``: each from the acceptance of a relay's token to ``worker``'s proposal of the next."""
        figures = self._of(worker)
        for delay_s in delays_s:
            figures.delays.observe(delay_s)
        figures.num_overlaps += bool(delays_s)

    def ingest(self, worker: str, num_tokens: int, took_s: float) -> None:
        """``took_s``: from sending them to hearing that they are there, less a round trip."""
        if num_tokens >= _MIN_EXTEND_TOKENS:
            self._of(worker).extend_s_per_token.append(max(0.0, took_s) / num_tokens)

    def itl_s(self, worker: str) -> float | None:
        """As it is now."""
        gaps = self._of(worker).gaps_s
        return median(gaps) if gaps else None

    def steady_itl_s(self, workers: Iterable[str]) -> float | None:
        """As it has been for minutes, of the slowest of them."""
        return max((itl_s for name in workers if (itl_s := self._of(name).steady.quantile_s(0.5)) is not None), default=None)

    def usual_delay_s(self, worker: str) -> float | None:
        """What nearly all delays of late did not exceed, and more where that rests on few overlaps: delays within one are alike, and a
        quantile of n samples is off by a share that falls with the root of n.
        """
        figures = self._of(worker)
        usual_s = figures.delays.quantile_s(_USUAL)
        return None if usual_s is None else usual_s * (1 + _DOUBT * figures.num_overlaps**-0.5)

    def extend_s_per_token(self, worker: str) -> float | None:
        costs = self._of(worker).extend_s_per_token
        return median(costs) if costs else None

    def _of(self, worker: str) -> _WorkerFigures:
        return self._workers.setdefault(worker, _WorkerFigures())
