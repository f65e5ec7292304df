"""Circuit breaking per worker: a worker whose requests keep failing gets none for a while, then one on trial. Pure.

    closed ──`failures` in a row──► open ──back-off over──► half_open ──success──► closed
                                     ▲                          │
                                     └─── failure, longer ◄─────┘    (a trial that says nothing: another at once)

Failures of the request itself (bad arguments, its own deadline) and a full worker's refusals are not told to a breaker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


@dataclass(frozen=True)
class BreakerLimits:
    """``failures``: in a row, until it opens · ``first_s``: of being open, the first time · ``factor``: for each further time ·
    ``longest_s``: at most.
    """

    failures: int
    first_s: float
    factor: float
    longest_s: float


@dataclass(frozen=True)
class Breaker:
    """``failures``: in a row · ``openings``: in a row, without a success between them · ``until``: when a trial may begin, by the
    caller's monotonic clock · ``trial_since``: when the trial began that is not decided yet.
    """

    state: BreakerState = "closed"
    failures: int = 0
    openings: int = 0
    until: float = 0.0
    trial_since: float = 0.0


def allows(breaker: Breaker, limits: BreakerLimits, now: float) -> bool:
    """Whether a request may go to the worker. A trial that nothing was heard of for ``longest_s`` does not stand in the way of another."""
    match breaker.state:
        case "closed":
            return True
        case "open":
            return now >= breaker.until
        case "half_open":
            return now >= breaker.trial_since + limits.longest_s


def began(breaker: Breaker, now: float) -> Breaker:
    """A request that was allowed is on its way; the first after the back-off is the trial."""
    return breaker if breaker.state == "closed" else replace(breaker, state="half_open", trial_since=now)


def abandoned(breaker: Breaker, now: float) -> Breaker:
    """The trial ended without a word on the worker, as when its client left: the next request may be one."""
    return replace(breaker, state="open", until=now) if breaker.state == "half_open" else breaker


def succeeded(breaker: Breaker) -> Breaker:
    """The worker did what it was asked. Where it is open, that was a request from before, which says nothing of now."""
    return breaker if breaker.state == "open" else Breaker()


def failed(breaker: Breaker, limits: BreakerLimits, now: float) -> Breaker:
    """The worker did not do what it was asked. Requests from before it opened that fail later do not make it wait longer."""
    if breaker.state == "open":
        return breaker
    failures = breaker.failures + 1
    if breaker.state == "closed" and failures < limits.failures:
        return replace(breaker, failures=failures)
    openings = breaker.openings + 1
    return Breaker("open", failures, openings, now + backoff_s(limits, openings))


def backoff_s(limits: BreakerLimits, openings: int) -> float:
    """``first_s * factor ** (openings - 1)``, at most ``longest_s``, without overflowing."""
    wait_s = min(limits.first_s, limits.longest_s)
    for _ in range(openings - 1):
        if wait_s >= limits.longest_s or limits.factor == 1.0:
            break
        wait_s = min(limits.longest_s, wait_s * limits.factor)
    return wait_s
