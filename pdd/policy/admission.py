"""Who starts, who waits and who is refused, at the edge, by what main workers have room for. Pure.

A request starts when main has room for its prompt and a part of its output, by what the coordinator has handed out. That counts a prefix
that several requests share several times, so where the room is used up by this count one request per main may ask all the same: main
itself grants or lets it wait, and until it has granted no other asks. So what runs is what main really has room for, one waits there, and
all others wait here, holding nothing anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Bounded sets: they label metrics. "no_main": no main worker is ready, so the request goes on to what is done then.
AdmissionReason = Literal["room", "asks", "no_main"]
RefusalReason = Literal["queue_full", "tokens_full", "too_slow", "waited"]
_RATE_MEMORY_S = 60.0
_MIN_COMPLETIONS = 3


@dataclass(frozen=True)
class MainRoom:
    """Of all ready main workers together. ``tokens``: of KV · ``rows``: requests that may run at once."""

    tokens: int
    rows: int
    num_mains: int


@dataclass(frozen=True)
class Claims:
    """What requests that were started and have not ended hold: how many they are, their tokens, and how many main has not granted yet."""

    num_requests: int = 0
    tokens: int = 0
    num_asking: int = 0


@dataclass(frozen=True)
class WaitingRequest:
    """``order``: of arrival · ``tokens``: its claim."""

    order: int
    tenant: str
    tokens: int


@dataclass(frozen=True)
class QueueLimits:
    """See :class:`pdd.flow_config.FlowConfig`."""

    max_requests: int
    max_tokens: int
    max_wait_s: float


@dataclass(frozen=True)
class Refusal:
    """``order``: of the request that is refused, the newest or another's in its place · ``text``: with the figures."""

    order: int
    reason: RefusalReason
    text: str


def claim_tokens(prompt_tokens: int, max_tokens: int, growth_reserve_tokens: int) -> int:
    """KV for which main must have room before the request starts."""
    return prompt_tokens + min(max_tokens, growth_reserve_tokens)


def next_waiting(waiting: Sequence[WaitingRequest], service: Mapping[str, int]) -> WaitingRequest | None:
    """Whose turn it is: the oldest of the tenant that was served least. ``service``: what tenants had, 0 where it is not said."""
    return min(waiting, key=lambda one: (service.get(one.tenant, 0), one.order), default=None)


def may_start(tokens: int, claims: Claims, room: MainRoom) -> AdmissionReason | None:
    """Whether a request of ``tokens`` starts now, and why; None: it waits. A request that is alone always may."""
    if not room.num_mains:
        return "no_main"
    if claims.num_requests >= max(1, room.rows):
        return None
    if not claims.num_requests or claims.tokens + tokens <= room.tokens:
        return "room"
    return "asks" if claims.num_asking < room.num_mains else None


def refuse_one(waiting: Sequence[WaitingRequest], limits: QueueLimits, completions_per_s: float | None) -> Refusal | None:
    """Who of those that wait, of whom the last has just come, is refused; None: nobody.

    Where the queue is full it is the newest of the tenant that has most there, so one tenant's flood costs no other tenant a place.
    """
    if not waiting:
        return None
    tokens = sum(one.tokens for one in waiting)
    if len(waiting) > limits.max_requests:
        return Refusal(_of_largest(waiting), "queue_full", f"{len(waiting) - 1} requests wait already, allowed are {limits.max_requests}")
    if tokens > limits.max_tokens:
        newest = waiting[-1]
        return Refusal(
            _of_largest(waiting),
            "tokens_full",
            f"requests of {tokens - newest.tokens} tokens wait already, with {newest.tokens} more it is over {limits.max_tokens}",
        )
    if completions_per_s and len(waiting) / completions_per_s > limits.max_wait_s:
        wait_s = len(waiting) / completions_per_s
        return Refusal(
            waiting[-1].order,
            "too_slow",
            f"{len(waiting) - 1} requests wait, {completions_per_s:.2g} complete per second: that takes {wait_s:.0f} s,"
            f" allowed are {limits.max_wait_s:g}",
        )
    return None


def completion_rate(ended_at_s: Sequence[float], now_s: float) -> float | None:
    """Requests per second, of the times at which they ended, oldest first; the first may be when counting began. None while that says
    little: before three have ended, lately.
    """
    recent = [at_s for at_s in ended_at_s if now_s - at_s <= _RATE_MEMORY_S]
    if len(recent) < _MIN_COMPLETIONS + 1 or now_s <= recent[0]:
        return None
    # Up to now, so that the rate falls while nothing ends.
    return (len(recent) - 1) / (now_s - recent[0])


def retry_after_s(num_waiting: int, completions_per_s: float | None, least_s: float, most_s: float) -> float:
    """When a place may be free for somebody who comes again: once those that wait now have started. Whole seconds."""
    wait_s = least_s if not completions_per_s else (num_waiting + 1) / completions_per_s
    return float(math.ceil(min(most_s, max(least_s, wait_s))))


def _of_largest(waiting: Sequence[WaitingRequest]) -> int:
    """The newest request of the tenant with most tokens in the queue."""
    held: dict[str, int] = {}
    for one in waiting:
        held[one.tenant] = held.get(one.tenant, 0) + one.tokens
    largest = max(held, key=lambda tenant: held[tenant])
    return max(one.order for one in waiting if one.tenant == largest)
