"""What decides how to hand over, as it was measured on earlier tokens and handoffs of all requests: by worker, the latest few."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_GAPS = 64
_EXTENDS = 16
# Below this many tokens an extend costs what the step costs, not what its tokens do.
_MIN_EXTEND_TOKENS = 8


def _gaps() -> deque[float]:
    return deque(maxlen=_GAPS)


def _extends() -> deque[float]:
    return deque(maxlen=_EXTENDS)


@dataclass
class _WorkerFigures:
    gaps_s: deque[float] = field(default_factory=_gaps)
    extend_s_per_token: deque[float] = field(default_factory=_extends)


class HandoffFigures:
    """Medians; None until something was measured."""

    def __init__(self) -> None:
        self._workers: dict[str, _WorkerFigures] = {}

    def gap(self, worker: str, gap_s: float) -> None:
        """Between two tokens of one request, both of ``worker``."""
        self._of(worker).gaps_s.append(gap_s)

    def ingest(self, worker: str, num_tokens: int, took_s: float) -> None:
        """``took_s``: from sending them to hearing that they are there, less a round trip."""
        if num_tokens >= _MIN_EXTEND_TOKENS:
            self._of(worker).extend_s_per_token.append(max(0.0, took_s) / num_tokens)

    def itl_s(self, worker: str) -> float | None:
        gaps = self._of(worker).gaps_s
        return median(gaps) if gaps else None

    def extend_s_per_token(self, worker: str) -> float | None:
        costs = self._of(worker).extend_s_per_token
        return median(costs) if costs else None

    def _of(self, worker: str) -> _WorkerFigures:
        return self._workers.setdefault(worker, _WorkerFigures())
