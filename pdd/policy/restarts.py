"""When the launcher starts a process again that ended: at once the first time, later and later after that, not for ever. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartLimits:
    """``most``: within ``window_s`` · ``first_s``: wait before the second of a window, doubled each time up to ``longest_s``."""

    most: int
    window_s: float
    first_s: float
    longest_s: float


def restart_wait_s(restarts: Sequence[float], limits: RestartLimits, now: float) -> float | None:
    """Seconds to wait before the next restart; None to give the process up. ``restarts``: times of the earlier ones."""
    recent = sum(now - at < limits.window_s for at in restarts)
    if recent >= limits.most:
        return None
    if recent == 0:
        return 0.0
    return min(limits.longest_s, limits.first_s * 2.0 ** min(recent - 1, 64))
